"""The depthwise convolution as a sum over taps: the padded image, shifted, times the tap's number for each channel.

    y[b, c, h, w] = bias[c] + sum over i, j of weight[c, 0, i, j] * x[b, c, h * sh + i * dh - ph, w * sw + j * dw - pw]

What the other backends are measured against, and the shapes and layouts that all of them share.

Shapes: x, grad_x (B, C, H, W), weight (C, 1, kh, kw), bias (C,), y, grad (B, C, OH, OW); stride (sh, sw), padding
(ph, pw) and dilation (dh, dw) are pairs.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = Sequence[int]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def layout_of(x: Tensor) -> torch.memory_format:
    """torch.channels_last where the channels of a pixel lie side by side; a 1x1 map is taken for contiguous."""
    beside = x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()
    return torch.channels_last if beside else torch.contiguous_format


def output_size(size: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> tuple[int, int]:
    """(OH, OW) for (H, W)."""
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(size, kernel, stride, padding, dilation)
    )


def new_output(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, dtype: torch.dtype | None = None
) -> Tensor:
    """An empty y, in x's layout."""
    size = output_size(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    shape = (*x.shape[:2], *size)
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device, memory_format=layout_of(x))


def new_input_gradient(x: Tensor) -> Tensor:
    """An empty grad_x: dense, in x's layout."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=layout_of(x))


def windows(kernel: Pair, stride: Pair, dilation: Pair, out: Pair) -> Iterator[tuple[int, int, tuple]]:
    """(i, j, the numbers of a padded image that tap (i, j) multiplies)."""
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            starts = i * dilation[0], j * dilation[1]
            yield i, j, (..., *(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, out, stride)))


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y in `dtype` (x's, if it is None)."""
    y = new_output(x, weight, stride, padding, dilation, dtype)
    padded, taps = _padded(x, padding), weight.to(wide(x.dtype))
    sums = torch.zeros_like(y, dtype=padded.dtype)
    for i, j, window in windows(weight.shape[2:], stride, dilation, y.shape[2:]):
        sums += padded[window] * taps[:, :, i, j, None]
    return y.copy_(sums if bias is None else sums + bias[:, None, None])


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by x (x's dtype), weight and bias (float32 or float64), where `needs` says so; None elsewhere."""
    padded, taps = _padded(x, padding), weight.to(wide(x.dtype))
    grad = grad.to(padded.dtype)
    grad_padded, grad_taps = torch.zeros_like(padded), torch.empty_like(taps)
    for i, j, window in windows(weight.shape[2:], stride, dilation, grad.shape[2:]):
        grad_padded[window] += grad * taps[:, :, i, j, None]
        grad_taps[:, 0, i, j] = (grad * padded[window]).sum((0, 2, 3))
    (ph, pw), (h, w) = padding, x.shape[2:]
    inside = grad_padded[..., ph : ph + h, pw : pw + w]
    grads = new_input_gradient(x).copy_(inside), grad_taps, grad.sum((0, 2, 3))
    return tuple(g if need else None for g, need in zip(grads, needs))


def _padded(x: Tensor, padding: Pair) -> Tensor:
    return F.pad(x.to(wide(x.dtype)), (padding[1], padding[1], padding[0], padding[0]))
