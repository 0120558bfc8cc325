"""Pooling that keeps nothing of its input: one byte a result for the place of a maximum, nothing at all for a mean.

PyTorch keeps the input of both, of which its backward pass reads the shape, and 8 bytes a result for a maximum.

Shapes: x (B, C, H, W) or (C, H, W), result (B, C, OH, OW) or (C, OH, OW).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair

from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.plain_convolution import slices

aten = torch.ops.aten
Pair = int | tuple[int, int]


def frozen_max_pool2d(
    x: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """F.max_pool2d, to the bit, gradient too. There is no second derivative.

    Raises ValueError for a window of more than 256 numbers, whose places do not fit a byte.
    """
    refuse_other_derivatives("frozen_max_pool2d", x)
    kernel = _pair(kernel_size)
    if kernel[0] * kernel[1] > 256:
        raise ValueError(f"kernel_size {kernel_size} has more than 256 numbers; F.max_pool2d takes it")
    if x.dim() == 3:
        return frozen_max_pool2d(x[None], kernel_size, stride, padding, dilation, ceil_mode)[0]
    window = kernel, _pair(stride or kernel), _pair(padding), _pair(dilation), ceil_mode
    return _MaxPool.apply(x, window)


def frozen_avg_pool2d(
    x: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """F.avg_pool2d, to the bit, gradient too. There is no second derivative."""
    refuse_other_derivatives("frozen_avg_pool2d", x)
    if x.dim() == 3:
        return frozen_avg_pool2d(x[None], kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)[
            0
        ]
    kernel = _pair(kernel_size)
    window = kernel, _pair(stride or kernel), _pair(padding), ceil_mode, count_include_pad, divisor_override
    return _AvgPool.apply(x, window)


def _origins(out: tuple[int, int], window, device) -> tuple[Tensor, Tensor]:
    """The first row (OH, 1) and column (OW,) of each window, of an image whose padding has negative ones."""
    _, stride, padding, _, _ = window
    rows, columns = (torch.arange(n, device=device) * s - p for n, s, p in zip(out, stride, padding))
    return rows[:, None], columns


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, window):
        (_, width), _, _, dilation, _ = window
        values = F.max_pool2d(x, *window)
        places = torch.empty_like(values, dtype=torch.uint8)
        top, left = _origins(values.shape[2:], window, x.device)
        for part in slices(values):
            found = aten.max_pool2d_with_indices(x[part], *window)[1]
            row = (found // x.shape[3] - top) // dilation[0]
            places[part] = row * width + (found % x.shape[3] - left) // dilation[1]
        ctx.window, ctx.like = window, _like(x)
        ctx.save_for_backward(places)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        (_, width), _, _, dilation, _ = ctx.window
        top, left = _origins(places.shape[2:], ctx.window, grad.device)
        into = _new(ctx.like, grad)
        for part in slices(places):
            place = places[part].long()
            found = (place // width * dilation[0] + top) * into.shape[3] + place % width * dilation[1] + left
            # of its input the kernel reads the shape and the layout
            into[part] = aten.max_pool2d_with_indices_backward(grad[part], into[part], *ctx.window, found)
        return into, None


class _AvgPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, window):
        ctx.window, ctx.like = window, _like(x)
        return F.avg_pool2d(x, *window)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        into = _new(ctx.like, grad)
        for part in slices(into):
            into[part] = aten.avg_pool2d_backward(grad[part], into[part], *ctx.window)
        return into, None


def _like(x):
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return x.shape, x.dtype, torch.channels_last if last else torch.contiguous_format


def _new(like, grad):
    shape, dtype, layout = like
    return torch.empty(shape, dtype=dtype, device=grad.device, memory_format=layout)
