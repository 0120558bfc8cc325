"""BatchNorm with an activation by PyTorch's operators.

Forward, backward and what is computed again for the latter all run the kernels of nn.BatchNorm2d and of the activation,
so that the numbers are theirs to the bit. Backward, a map of more than WHOLE bytes goes some channels at a time, so
that little is held beside it, and its gradient is written where the gradient came in; that takes three copies of each
slice.

Shapes: x (B, C, H, W); mean, rstd, scale (C,), float32 or wider.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.norm_act.activations import ACTIVATIONS
from lean_arch.ops.norm_act.reference import Norm
from lean_arch.ops.plain_convolution import slices

WHOLE = 2**19  # the kernel takes two maps beside those it reads
_native = torch.ops.aten.native_batch_norm
_native_backward = torch.ops.aten.native_batch_norm_backward


def forward(x, weight, bias, running_mean, running_var, batch: bool, momentum: float, eps: float, act: str):
    """As in reference.py."""
    if batch:
        result, mean, rstd = _native(x, weight, bias, running_mean, running_var, True, momentum, eps)
        norm = Norm(mean, rstd, None, eps, act, "torch")
    else:
        result = F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
        norm = Norm(running_mean, torch.rsqrt(running_var + eps), running_var, eps, act, "torch")
    return ACTIVATIONS[act][0](result), norm


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
    """norm(x) again, to the bit: BatchNorm's kernel multiplies by rstd * weight."""
    return _affine(x, norm.scale(weight), bias, norm.mean)


def _affine(x: Tensor, scale: Tensor, bias: Tensor | None, mean: Tensor) -> Tensor:
    """(x - mean) * scale + bias in x's dtype, one pass."""
    return F.batch_norm(x, mean, torch.ones_like(mean), scale, bias, False, 0.0, 0.0)


def activate(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
    """act(norm(x)) again, to the bit."""
    return ACTIVATIONS[norm.act][0](normalise(x, weight, bias, norm))


def backward(
    grad: Tensor | None,
    pooled_grad: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    into: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As in reference.py, where a map that goes whole, written over, leaves its gradient in a tensor of its own."""
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    if grad is into and x.nbytes <= WHOLE and dense and grad.stride() == x.stride():
        return _of_channels(grad, pooled_grad, x, weight, bias, norm)
    of_weight, of_bias = torch.empty_like(norm.mean), torch.empty_like(norm.mean)
    for c in slices(x, dim=1, elements=WHOLE // x.itemsize):
        z = x[:, c].contiguous()
        g = torch.zeros_like(z) if grad is None else grad[:, c].clone(memory_format=torch.contiguous_format)
        w, b, mean, rstd, var = (None if t is None else t[c] for t in (weight, bias, norm.mean, norm.rstd, norm.var))
        pooled = None if pooled_grad is None else pooled_grad[:, c]
        part = Norm(mean, rstd, var, norm.eps, norm.act, norm.backend)
        into[:, c], of_weight[c], of_bias[c] = _of_channels(g, pooled, z, w, b, part)
    return into, of_weight, of_bias


def _of_channels(
    grad: Tensor, pooled_grad: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward`, which writes over `grad`."""
    if pooled_grad is not None:
        grad += pooled_grad / (x.shape[2] * x.shape[3])
    if norm.act != "identity":
        grad = ACTIVATIONS[norm.act][1](grad, normalise(x, weight, bias, norm))
    frozen = (None, None) if norm.var is None else (norm.mean, norm.var)
    return _native_backward(
        grad, x, weight, *frozen, norm.mean, norm.rstd, norm.var is None, norm.eps, [True, True, True]
    )
