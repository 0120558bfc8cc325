"""Patterns as text, for compiled graphs hold tensors, numbers and text only.

A pattern's text is its `str`. All but those with a mask can be built anew from it; a mask is found for as long as its
pattern lives.
"""

import ast
import weakref

import torch

from lean_arch.ops import patterns
from lean_arch.ops.patterns import Pattern

_alive = weakref.WeakValueDictionary()  # text -> a pattern spelled so
BUILT = {
    "dense": patterns.dense,
    "causal": patterns.causal,
    "local": patterns.local,
    "global_tokens": patterns.global_tokens,
    "random_blocks": patterns.random_blocks,
    "strided": patterns.strided,
    "chunks": patterns.Chunks,
}


def spell(pattern: Pattern) -> str:
    """The pattern as text, for `parse`."""
    text = str(pattern)
    if not torch.compiler.is_compiling():
        _alive[text] = pattern
    return text


def parse(text: str) -> Pattern:
    """The pattern of a text such as `spell` makes, "(local(256, 0) | global_tokens(64)) & causal()".

    Raises ValueError for any other text, RuntimeError for a mask that is no more.
    """
    known = _alive.get(text) if isinstance(text, str) else None
    if known is not None:
        return known
    try:
        return _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"pattern {text!r} does not say what is seen; '(local(256, 0) | global_tokens(64)) & causal()' does"
        ) from error


def _build(node: ast.expr) -> Pattern:
    if isinstance(node, ast.BinOp):
        join = {ast.BitOr: patterns.Union, ast.BitAnd: patterns.Intersection}[type(node.op)]
        return join(_build(node.left), _build(node.right))
    if node.func.id == "from_mask":
        found = patterns.living_masks.get(ast.unparse(node))
        if found is None:
            raise RuntimeError(f"pattern {ast.unparse(node)} is gone; keep it for as long as what was compiled with it")
        return found
    numbers = [ast.literal_eval(argument) for argument in node.args]
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return BUILT[node.func.id](*numbers, **named)
