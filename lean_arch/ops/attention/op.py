"""Attention in which a pattern says which query sees which key: checks, and what PyTorch is told of the operator.

The operator keeps q, k, v, its output and the log-sum-exp of each row for the backward pass, and no scores. A pattern
enters it spelled out, so that compiled graphs hold tensors, numbers and text only. What computes is a backend, a module
with `forward` and `backward` as in reference.py.

Shapes: q (B, Hq, Nq, D); k, v (B, Hkv, Nk, D), Hq a multiple of Hkv; out as q; lse (B, Hq, Nq).
"""

import importlib
import math
import numbers

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_arch.ops.attention import pieces
from lean_arch.ops.attention.problem import Problem, arithmetic
from lean_arch.ops.attention.tiles import compile_tiles
from lean_arch.ops.backend import backend_for
from lean_arch.ops.derivatives import refuse_other_derivatives
from lean_arch.ops.pattern_text import parse, spell
from lean_arch.ops.patterns import Pattern

ROOMS = {"reference": "reference", "torch": "portable", "triton": "kernels"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HEAD_SIZES = range(8, 257)
AT_ONCE = 2**22  # elements of out and its gradient that are multiplied at a time


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    key_lengths: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale Q K^T) V over the pairs that `pattern` allows, in memory linear in the length, in training too.

    Args:
        q: (B, Hq, Nq, D), D from 8 to 256; float32, float16, bfloat16 or float64. Under autocast, cast to its dtype.
            The last query is at the position of the last key (as in FlashAttention).
        k, v: (B, Hkv, Nk, D), Hq a multiple of Hkv: each of their heads serves Hq / Hkv query heads in a row.
        pattern: from `lean_arch.ops.patterns`, e.g. `(local(256) | global_tokens(64)) & causal()`.
        key_lengths: (B,) integers: only the first so many keys of each sequence count (none below 0, all above Nk).
            What lies beyond must be finite all the same, as everywhere that a pattern does not look.
        segment_ids: (B, Nk) integers of 32 bits: a query sees keys of its own segment only, as in packed sequences;
            queries take the last Nq of them. Or a pair (B, Nq), (B, Nk).
        scale: of the scores; 1 / sqrt(D) by default.
        dropout_p: share of the weights set to zero, the others scaled by 1 / (1 - dropout_p). It acts whenever it is
            not zero: pass zero outside training. Its seed is drawn from torch's generator of the device.
        return_lse: return also the log-sum-exp of each row's scores, which can be differentiated.

    Returns:
        (B, Hq, Nq, D) in q's dtype; with `return_lse` also (B, Hq, Nq) in float32 (float64 for float64). A row that
        sees no key gives 0, its log-sum-exp -inf, and no gradient.

    Raises ValueError (TypeError for a pattern that is none) where arguments do not fit each other.
    """
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    refuse_other_derivatives("sparse_attention", q, k, v)
    _check(q, k, v, pattern, scale, dropout_p)
    batch, _, nq, size = q.shape
    nk = k.shape[2]
    q_segments, k_segments = _segments(segment_ids, batch, nq, nk, q.device)
    if key_lengths is not None:
        key_lengths = _integers("key_lengths", key_lengths, (batch,), q.device).clamp(0, nk).to(torch.int32)
    seed = None
    if dropout_p > 0:
        seed = torch.randint(2**62, (1,), dtype=torch.int64, device=q.device)
    out, lse = torch.ops.lean_arch.sparse_attention(
        q,
        k,
        v,
        key_lengths,
        q_segments,
        k_segments,
        seed,
        spell(pattern),
        1 / math.sqrt(size) if scale is None else float(scale),
        float(dropout_p),
        _backend(q.device),
    )
    return (out, lse) if return_lse else out


@torch.compiler.assume_constant_result
def _backend(device: torch.device) -> str:
    """Chosen when a function is compiled, not each time it runs."""
    return backend_for(device)


def _check(q, k, v, pattern, scale, dropout_p):
    if not isinstance(pattern, Pattern):
        kind = type(pattern).__name__
        raise TypeError(
            f"pattern is a {kind}; local(256) of lean_arch.ops.patterns is one, and from_mask(mask) makes one"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor (batch, heads, length, head size), got {found}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; float32, float16, bfloat16 and float64 work")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, but q is {q.dtype} on {q.device}")
    if k.shape != v.shape:
        raise ValueError(f"v is {tuple(v.shape)} but k is {tuple(k.shape)}; they must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"k is {tuple(k.shape)} but q is {tuple(q.shape)}; batch and head size must be the same")
    if q.shape[1] == 0 or k.shape[1] == 0:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[1]}; it takes one or more of both")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which is not a multiple of the {k.shape[1]} heads of k")
    if q.shape[3] not in HEAD_SIZES:
        raise ValueError(f"head size {q.shape[3]} of q is not supported; 8 to 256 are")
    if q.shape[2] == 0 or k.shape[2] == 0:
        raise ValueError(f"there are {q.shape[2]} queries and {k.shape[2]} keys; it takes one or more of both")
    if not isinstance(dropout_p, numbers.Real) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p {dropout_p!r} must be a number, 0 or more and less than 1")
    if scale is not None and not (isinstance(scale, numbers.Real) and math.isfinite(scale)):
        raise ValueError(f"scale {scale!r} must be a finite number")
    pattern.check(q.shape[2], k.shape[2])


def _integers(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    whole = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
    if not whole or tensor.dtype == torch.bool or tuple(tensor.shape) != shape:
        found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
        raise ValueError(f"{name} must be a tensor of integers {shape}, got {found}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but q is on {device}; it must be there too")
    return tensor


def _segment(name: str, ids: Tensor, shape: tuple[int, int], device: torch.device) -> Tensor:
    ids = _integers(name, ids, shape, device)
    # read only where it is at hand: on a GPU it would be waited for, and a compiler's stand-in holds nothing
    if ids.dtype == torch.int64 and ids.is_cpu and type(ids) is Tensor and not torch.compiler.is_compiling():
        low, high = (int(end) for end in ids.aminmax()) if ids.numel() else (0, 0)
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{name} go from {low} to {high}; they must fit in 32 bits")
    return ids.to(torch.int32)


def _segments(ids, batch, nq, nk, device) -> tuple[Tensor | None, Tensor | None]:
    if ids is None:
        return None, None
    if isinstance(ids, (tuple, list)):
        if len(ids) != 2:
            raise ValueError(f"segment_ids has {len(ids)} tensors; one (B, Nk) or a pair (B, Nq), (B, Nk) works")
        sizes = (batch, nq), (batch, nk)
        return tuple(_segment(f"segment_ids[{n}]", ids[n], sizes[n], device) for n in range(2))
    keys = _segment("segment_ids", ids, (batch, nk), device)
    if nq > nk:
        raise ValueError(f"segment_ids of {nk} keys say nothing of {nq} queries; a pair (B, Nq), (B, Nk) does")
    return keys[:, nk - nq :], keys


@torch.library.custom_op("lean_arch::sparse_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    scale: float,
    dropout_p: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    problem = Problem(parse(pattern), scale, key_lengths, q_segments, k_segments, dropout_p, seed)
    return _room(backend).forward(q, k, v, problem)


@_forward.register_fake
def _(q, k, v, key_lengths, q_segments, k_segments, seed, pattern, scale, dropout_p, backend):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=arithmetic(q.dtype))


@torch.library.custom_op("lean_arch::sparse_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_lengths: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    scale: float,
    dropout_p: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(parse(pattern), scale, key_lengths, q_segments, k_segments, dropout_p, seed)
    delta = row_products(grad_out, out)
    if grad_lse is not None:
        delta -= grad_lse
    # the fused kernel makes its own delta, of the output alone
    more = {"out": out} if backend == "torch" and grad_lse is None else {}
    return _room(backend).backward(grad_out, delta, q, k, v, lse, problem, **more)


@_backward.register_fake
def _(grad_out, grad_lse, q, k, v, *others):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def row_products(x: Tensor, y: Tensor) -> Tensor:
    """sum(x * y, -1) in the arithmetic of their dtype, (B, H, N), without a product of their size."""
    dtype = arithmetic(x.dtype)
    sums = x.new_empty(x.shape[:3], dtype=dtype)
    rows = _rows_at_once(x)
    for start in range(0, x.shape[2], rows):
        part = slice(start, start + rows)
        torch.sum(x[:, :, part].to(dtype) * y[:, :, part], -1, out=sums[:, :, part])
    return sums


def products_bytes(x: Tensor) -> int:
    """What `row_products` takes, its result included: a product and, of 16-bit numbers, both factors widened."""
    dtype, part = arithmetic(x.dtype), min(_rows_at_once(x), x.shape[2])
    factors = 3 if x.dtype != dtype else 1
    return dtype.itemsize * x.shape[:2].numel() * (x.shape[2] + factors * part * x.shape[3])


def _rows_at_once(x: Tensor) -> int:
    return max(AT_ONCE // max(x.shape[0] * x.shape[1] * x.shape[3], 1), 1)


def _room(backend: str):
    return importlib.import_module(f"lean_arch.ops.attention.{ROOMS[backend]}")


def _remember(ctx, inputs, output):
    q, k, v, *small, pattern, scale, dropout_p, backend = inputs
    ctx.save_for_backward(q, k, v, *output, *small)
    ctx.numbers = pattern, scale, dropout_p, backend
    ctx.pattern = parse(pattern)  # a mask lives as long as its pattern does
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse):
    q, k, v, out, lse, *small = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = torch.ops.lean_arch.sparse_attention_backward(grad_out, grad_lse, q, k, v, out, lse, *small, *ctx.numbers)
    return *grads, *[None] * 8


_forward.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx, *grads):
    raise RuntimeError("sparse_attention cannot be differentiated twice; F.scaled_dot_product_attention can")


_backward.register_autograd(_refuse)


@register_flop_formula(torch.ops.lean_arch.sparse_attention)
def _forward_flops(q_shape, k_shape, v_shape, *others, out_shape=None) -> int:
    """Two products: scores and results."""
    return 2 * _product_flops(q_shape, k_shape, *others[-4:])


@register_flop_formula(torch.ops.lean_arch.sparse_attention_backward)
def _backward_flops(grad_shape, grad_lse_shape, q_shape, k_shape, *others, out_shape=None) -> int:
    """Five: scores again, gradients of weights, queries, keys and values."""
    return 5 * _product_flops(q_shape, k_shape, *others[-4:])


def _product_flops(q_shape, k_shape, pattern, scale, dropout_p, backend) -> int:
    batch, heads, nq, size = q_shape
    nk = k_shape[2]
    tile = (pieces.TILE_Q, pieces.TILE_K) if backend == "torch" else (64, 64)
    pairs = nq * nk if backend == "reference" else compile_tiles(parse(pattern), nq, nk, *tile).area
    return 2 * batch * heads * size * pairs
