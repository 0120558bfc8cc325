"""BatchNorm with an activation by PyTorch's operators.

Forward, backward and what is computed again for the latter all run the kernels of nn.BatchNorm2d and of the activation,
so that the numbers are theirs to the bit; backward, some channels at a time, so that they stay in a cache, and the
gradient is written where the gradient came in.

Shapes: x (B, C, H, W); mean, rstd, scale (C,), float32 or wider.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.norm_act.activations import ACTIVATIONS
from lean_arch.ops.norm_act.reference import Norm
from lean_arch.ops.plain_convolution import slices

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
    """As in reference.py."""
    of_weight, of_bias = torch.empty_like(norm.mean), torch.empty_like(norm.mean)
    for c in slices(x, dim=1, elements=2**17):
        w, b, mean, rstd, var = (None if t is None else t[c] for t in (weight, bias, norm.mean, norm.rstd, norm.var))
        z = x[:, c].contiguous()
        g = torch.zeros_like(z) if grad is None else grad[:, c].clone(memory_format=torch.contiguous_format)
        if pooled_grad is not None:
            g += pooled_grad[:, c] / (x.shape[2] * x.shape[3])
        g = ACTIVATIONS[norm.act][1](g, normalise(z, w, b, Norm(mean, rstd, var, norm.eps, norm.act, "torch")))
        frozen = (None, None) if var is None else (mean, var)
        into[:, c], of_weight[c], of_bias[c] = _native_backward(
            g, z, w, *frozen, mean, rstd, var is None, norm.eps, [True, True, True]
        )
    return into, of_weight, of_bias
