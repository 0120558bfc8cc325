"""A linear layer with a frozen weight under autocast: its backward pass keeps the weight itself, not a 16-bit copy.

PyTorch's own keeps no input of a layer whose weight is frozen, but a copy of the weight as autocast made it: 172 MB for
a ViT-B/16, for autocast has no cache for weights that require no gradient. Here the copy is made again.

Shapes: x (..., I), weight (O, I), bias (O,), result (..., O).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.plain_convolution import without_autocast


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), to the bit, autocast or not; keeps the weight. The bias may be trained.

    The gradient of the bias is summed in float32 or wider. There is no second derivative.

    Raises ValueError where weight requires a gradient.
    """
    refuse_other_derivatives("frozen_linear", x, weight, bias)
    if weight.requires_grad:
        raise ValueError("weight requires a gradient, for which x would have to be kept; F.linear keeps it")
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight)
        ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        of_x = of_bias = None
        with without_autocast(grad):
            if ctx.needs_input_grad[0]:
                # along rows, in which a CPU without 16-bit arithmetic multiplies six times as fast
                rows = weight.t().to(grad.dtype, memory_format=torch.contiguous_format)
                of_x = F.linear(grad, rows).to(ctx.dtype)
            if ctx.needs_input_grad[2]:
                wide = torch.promote_types(grad.dtype, torch.float32)
                of_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=wide).to(ctx.bias_dtype)
        return of_x, None, of_bias
