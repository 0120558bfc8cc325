"""BatchNorm with a frozen weight: by running statistics it keeps (C,) slopes, by the batch's own 8 bits a number.

PyTorch keeps the input of both. By running statistics BatchNorm is a map a channel, and only the gradient of the weight
would need its input; by the batch's own, the gradient of x needs the normalised numbers, in a projection alone, for
which 8 bits are nearly enough: it is off by 1e-4 of its norm.

Shapes: x (B, C, *size), running_mean, running_var, weight, bias (C,).
"""

import torch
from torch import Tensor

from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.frozen.convolution import channel_sums
from lean_arch.ops.frozen.norm import codes_of, normalised
from lean_arch.ops.plain_convolution import slices


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
    _check("frozen_batch_norm", x, weight, bias)
    return _Map.apply(x, running_mean, running_var, weight, bias, eps)


def compressed_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm(..., training=True), which updates running statistics; keeps the normalised x in 8 bits.

    x is (B, C, *size) with one size or more. Otherwise as `frozen_batch_norm`, but that the gradient is nearly exact.
    """
    _check("compressed_batch_norm", x, weight, bias)
    with torch.no_grad():
        values, mean, rstd = torch.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return _Batch.apply(x, weight, bias, values, mean, rstd)


def _check(name, x, weight, bias):
    refuse_other_derivatives(name, x, weight, bias)
    if weight is not None and weight.requires_grad:
        raise ValueError("weight requires a gradient, for which x would have to be kept; F.batch_norm keeps it")


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


class _Batch(torch.autograd.Function):
    """`values`, computed before, as a function of x and bias. A row is a channel of an image."""

    @staticmethod
    def forward(ctx, x, weight, bias, values, mean, rstd):
        channels = 1, x.shape[1], *[1] * (x.dim() - 2)
        codes, scales = torch.empty_like(x, dtype=torch.int8), []
        mean, rstd = mean.view(channels), rstd.view(channels)
        for part in slices(x):
            codes[part], scale = codes_of(normalised(x[part], mean, rstd), tuple(range(2, x.dim())))
            scales.append(scale)
        ctx.save_for_backward(codes, torch.cat(scales), rstd if weight is None else rstd * weight.view(channels))
        ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return values.detach()  # no view, so that it can be written over

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        codes, scale, slope = ctx.saved_tensors
        parts = list(slices(codes))
        rows = tuple(range(2, codes.dim()))
        of_x = torch.empty_like(codes, dtype=ctx.dtype)
        total, along = torch.zeros_like(slope, dtype=scale.dtype), torch.zeros_like(slope, dtype=scale.dtype)
        for part in parts:
            g = grad[part].to(scale.dtype)
            total += g.sum((0, *rows), keepdim=True)
            along += (g * codes[part]).sum(rows, keepdim=True).mul_(scale[part]).sum(0, keepdim=True)
        number = codes.numel() // codes.shape[1]
        for part in parts:
            g = grad[part].to(scale.dtype) - total / number
            of_x[part] = torch.addcmul(g, codes[part] * scale[part], along, value=-1 / number).mul_(slope)
        of_bias = total.view(-1).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return (of_x if ctx.needs_input_grad[0] else None), None, of_bias, None, None, None
