"""Convolution with a frozen weight: its backward pass keeps the weight, and nothing of its input.

PyTorch keeps the input of every convolution, and under autocast a 16-bit copy of its weight. Only the gradient of the
weight would need the former, and the latter is made again. The gradient of the bias needs nothing.

Shapes: x (B, C, *size), weight (O, C / groups, *kernel), bias (O,), y (B, O, *size); one, two or three sizes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.plain_convolution import slices, without_autocast

CONVOLUTIONS = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}


def frozen_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """F.conv1d, F.conv2d or F.conv3d, as weight (O, C / groups, *kernel) has it, to the bit, autocast or not.

    The gradient of x is made by PyTorch's kernels, some images at a time, and differs by rounding where they do. That
    of the bias is summed in float32 or wider. There is no second derivative.

    Args:
        x: (B, C, *size) or (C, *size).
        weight: frozen.
        bias: (O,), frozen or trained.
        padding: numbers, "valid" or "same".

    Raises ValueError where weight requires a gradient, and what F.conv2d raises where arguments do not fit.
    """
    refuse_other_derivatives("frozen_conv", x, weight, bias)
    if weight.requires_grad:
        raise ValueError("weight requires a gradient, for which x would have to be kept; F.conv2d keeps it")
    convolution = CONVOLUTIONS.get(weight.dim())
    if convolution is None:
        raise ValueError(f"weight must be (O, C / groups, *kernel) of 1 to 3 sizes, got {tuple(weight.shape)}")
    sizes = weight.dim() - 2
    if x.dim() == sizes + 1:  # no batch
        return frozen_conv(x[None], weight, bias, stride, padding, dilation, groups)[0]
    stride, dilation = _numbers(stride, sizes), _numbers(dilation, sizes)
    if isinstance(padding, str):
        x, padding = _padded(x, weight, stride, padding, dilation)
    geometry = stride, _numbers(padding, sizes), dilation, groups
    return _Convolve.apply(x, weight, bias, convolution, geometry)


def _numbers(value, sizes: int) -> list[int]:
    value = list(value) if isinstance(value, (tuple, list)) else [value]
    return value * sizes if len(value) == 1 else value


def _padded(x, weight, stride, padding, dilation):
    """(x, padding) for a padding by name; where the two ends differ, x has the difference already."""
    if padding == "valid":
        return x, 0
    if padding != "same" or any(s != 1 for s in stride):
        raise ValueError(
            f"padding {padding!r} with stride {stride} is unknown: 'valid', 'same' with stride 1 or numbers"
        )
    both = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
    if any(n % 2 for n in both):
        x = F.pad(x, [n for total in reversed(both) for n in (0, total % 2)])
    return x, [total // 2 for total in both]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, convolution, geometry):
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.bias_dtype = geometry, None if bias is None else bias.dtype
        y = convolution(x, weight, bias, *geometry)
        last = x.dim() == 4 and not x.is_contiguous() and y.is_contiguous(memory_format=torch.channels_last)
        ctx.x = x.shape, x.dtype, torch.channels_last if last else torch.contiguous_format
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad[:3]
        with without_autocast(grad):
            of_x = _input_gradient(grad, weight.to(grad.dtype), *ctx.x, ctx.geometry) if needs_x else None
            of_bias = channel_sums(grad).to(ctx.bias_dtype) if needs_bias else None
        return of_x, None, of_bias, None, None


def _input_gradient(grad, weight, shape, dtype, layout, geometry):
    *geometry, groups = geometry
    none = [0] * len(geometry[0])
    into = torch.empty(shape, dtype=dtype, device=grad.device, memory_format=layout)
    for part in slices(into):
        # the kernel reads its input's shape and layout, and not the numbers
        stand_in = into[part] if dtype == grad.dtype else torch.empty_like(into[part], dtype=grad.dtype)
        into[part] = torch.ops.aten.convolution_backward(
            grad[part], stand_in, weight, None, *geometry, False, none, groups, [True, False, False]
        )[0]
    return into


def channel_sums(x: Tensor) -> Tensor:
    """Sums over all dimensions but the second, (C,), in float32 or wider."""
    dims = [d for d in range(x.dim()) if d != 1]
    total = x.new_zeros(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    for part in slices(x):
        total += x[part].sum(dims, dtype=total.dtype)
    return total
