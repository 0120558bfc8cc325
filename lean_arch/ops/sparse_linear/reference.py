"""The layers as a textbook writes them: the update is scattered into a dense weight, and autograd does the rest.

What the other backends are measured against. The gradient of a value is that of its place in the dense weight, which
here exists as a whole.

Shapes: x (..., C), weight (O, C, *kernel), bias (O,), values as structures.py says.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lean_arch.ops.sparse_linear.structures import Structure

Updates = list[tuple[Tensor, Structure]]


def updated(weight: Tensor, updates: Updates, groups: int = 1) -> Tensor:
    """The frozen weight with every update added at its places."""
    weight = plain(weight).detach()
    for values, structure in updates:
        places = structure.positions(weight.shape, groups).flatten()
        weight = weight.flatten().index_add(0, places, values.flatten().to(weight.dtype)).view(weight.shape)
    return weight


def plain(weight: Tensor) -> Tensor:
    """`weight` itself, or what a quantised one stands for."""
    if not is_quantised(weight):
        return weight
    # torchao's NF4 has something else by the name of dequantize
    return weight.get_original_weight() if hasattr(weight, "get_original_weight") else weight.dequantize()


def is_quantised(weight: Tensor) -> bool:
    """Whether it is of a class of tensors with numbers of their own and a way back from them."""
    return is_traceable_wrapper_subclass(weight) and type(weight).dequantize is not Tensor.dequantize


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Updates) -> Tensor:
    return F.linear(x, updated(weight, updates), bias)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, updates: Updates, stride, padding, dilation, groups: int
) -> Tensor:
    return F.conv2d(x, updated(weight, updates, groups), bias, stride, padding, dilation, groups)


def embedding(ids: Tensor, weight: Tensor, updates: Updates, padding_idx: int | None) -> Tensor:
    return F.embedding(ids, updated(weight, updates), padding_idx)
