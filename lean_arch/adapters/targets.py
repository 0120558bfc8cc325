"""Which layers of a model an adapter changes: those that a preset or a regular expression names."""

import difflib
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lean_arch.adapters.layers import (
    AdaptedAttention,
    AdaptedConv,
    AdaptedEmbedding,
    AdaptedLinear,
    AdaptedNorm,
    AdaptedTransposedLinear,
    matrix,
    mixin_for,
)

LINEAR = AdaptedLinear, AdaptedTransposedLinear, AdaptedAttention
# by what the parts of a layer's name are called in timm, torchvision and transformers
ATTENTION = re.compile(
    r"(.*\.)?(\w*att(n|ention)\w*(\..*)?|qkv|[qkv]|to_[qkv]\w*|[qkvo]_proj|query|key|value|query_key_value|in_proj)"
)
MLP = re.compile(
    r"(.*\.)?((mlp|ffn|feed_?forward|intermediate)\w*(\..*)?|fc\d?|lin\d|(gate|up|down)_proj|w[io](_\d)?)",
)
PRESETS = {  # name -> (mixins of the layers, what their name must match or None)
    "layers": ((*LINEAR, AdaptedConv), None),
    "linear": (LINEAR, None),
    "attention": (LINEAR, ATTENTION),
    "mlp": (LINEAR, MLP),
    "convs": ((AdaptedConv,), None),
    "embeddings": ((AdaptedEmbedding,), None),
    "norms": ((AdaptedNorm,), None),
}
FUSED = re.compile(r"(.*\.)?(qkv|in_proj|c_attn|query_key_value|to_qkv|Wqkv)")


@dataclass(frozen=True)
class Layer:
    """A layer to adapt. weight: outputs first, (O, C, *kernel), a view; rows: of its outputs those that may change."""

    name: str
    module: nn.Module
    weight: Tensor
    rows: Tensor | None = None

    @property
    def groups(self) -> int:
        return getattr(self.module, "groups", 1)


def find_layers(model: nn.Module, target: str, qkv: str = "qkv", without: frozenset[str] = frozenset()) -> list[Layer]:
    """The layers of `model` that `target` names, in the order of the module tree.

    Args:
        target: a preset ("layers": linear layers and convolutions, "linear", "attention", "mlp", "convs", "embeddings",
            "norms"), or a regular expression that the whole name of a layer matches.
        qkv: which thirds of a fused query, key and value projection may change.
        without: names of parameters; layers that have one as their weight are left out.

    Raises ValueError where nothing can be adapted, and for a layer that a regular expression names alone though it
    computes something else than the adapters know.
    """
    if not isinstance(target, str):
        raise TypeError(f"target {target!r} must be a string: a regular expression or one of {', '.join(PRESETS)}")
    if not qkv or set(qkv) - set("qkv"):
        raise ValueError(f"qkv {qkv!r} must be of the letters q, k and v, as 'qv'")
    kinds, pattern = PRESETS.get(target, (None, None))
    if kinds is None:
        pattern = compiled(target)
    layers, seen = [], set()
    names = [(name, module) for name, module in model.named_modules() if ".adapters." not in f".{name}."]
    for name, module in names:
        mixin = mixin_for(module)
        named = pattern is None or pattern.fullmatch(name)
        if mixin is None or not named or module in seen or (kinds is not None and mixin not in kinds):
            continue
        seen.add(module)
        if f"{name}.{mixin.weight_name}".lstrip(".") in without:
            continue
        weight = matrix(module)
        layers.append(Layer(name, module, weight, rows_of(name, weight, qkv)))
    if not layers:
        known = [name for name, module in names if mixin_for(module) is not None]
        near = difflib.get_close_matches(target, known, 3, 0.3) or known[:3]
        hint = f"layers here are {', '.join(map(repr, near))}" if near else "this model has none that can be adapted"
        raise ValueError(f"target {target!r} matches no layer; {hint}, presets are {', '.join(PRESETS)}")
    return layers


def compiled(target: str) -> re.Pattern:
    try:
        return re.compile(target)
    except re.error as error:
        raise ValueError(f"target {target!r} is not a regular expression ({error}); '.*attn.*' is one") from error


def rows_of(name: str, weight: Tensor, qkv: str) -> Tensor | None:
    """Outputs of the chosen thirds of a fused projection, or None for all."""
    if set(qkv) == set("qkv") or not FUSED.fullmatch(name) or weight.shape[0] % 3:
        return None
    thirds = torch.arange(weight.shape[0], device=weight.device).view(3, -1)
    return thirds[sorted("qkv".index(letter) for letter in set(qkv))].flatten()
