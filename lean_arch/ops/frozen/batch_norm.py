"""BatchNorm by running statistics with a frozen weight: a map a channel, whose backward pass keeps its slope.

PyTorch keeps the input, which only the gradient of the weight would need.

Shapes: x (B, C, *size), running_mean, running_var, weight, bias (C,).
"""

import torch
from torch import Tensor

from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.frozen.convolution import channel_sums


def frozen_batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm(x, running_mean, running_var, weight, bias, eps=eps), as in eval(), to the bit; keeps (C,) numbers.

    The bias may be trained; its gradient is summed in float32 or wider. There is no second derivative.

    Raises ValueError where weight requires a gradient.
    """
    refuse_other_derivatives("frozen_batch_norm", x, weight, bias)
    if weight is not None and weight.requires_grad:
        raise ValueError("weight requires a gradient, for which x would have to be kept; F.batch_norm keeps it")
    return _Map.apply(x, running_mean, running_var, weight, bias, eps)


def _normalise(x, mean, var, weight, bias, eps):
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mean, var, weight, bias, eps):
        slope = 1 / (var + eps).sqrt()
        ctx.save_for_backward(slope if weight is None else slope * weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _normalise(x, mean, var, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            zeros, ones = torch.zeros_like(slope), torch.ones_like(slope)
            # the map's own kernel multiplies 16-bit numbers by wider slopes without a wide copy
            of_x = _normalise(grad, zeros, ones, slope, zeros, 0.0)
        if ctx.needs_input_grad[4]:
            of_bias = channel_sums(grad).to(ctx.bias_dtype)
        return of_x, None, None, None, of_bias, None
