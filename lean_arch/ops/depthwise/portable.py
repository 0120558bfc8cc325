"""The depthwise convolution by PyTorch's operators: on a CPU oneDNN's float32 kernels, in slices that fit its caches.

What is done here against one core of an AMD EPYC (AVX2, torch 2.14; milliseconds of processor time at batch 8: forward,
grad_x, grad_weight), beside F.conv2d and its backward:

    C, map, filter               contiguous, F.conv2d     here         channels_last, F.conv2d   here
    144, 56x56, 3x3              9.3   9.4  12.2      15.1 15.7 14.5      7.1   6.4  17.7     11.1  7.3 18.5
    672, 14x14, 5x5              5.3   6.3  31.3       8.4  8.1  8.3      4.4   3.9  18.3      3.9  3.3  9.8
    96, 56x56, 7x7              12.4  13.9  195       19.5 17.0 16.9     15.9  11.5  69.1     16.3 11.5 25.4
    96, 56x56, 3x3, stride 2     4.0   4.6   3.7       5.1  8.1  6.2      1.9   2.7   3.3      2.1  2.9  3.8
    96, 56x56, 3x3, dilation 6  21.6   113  42.2      16.2 14.8 14.5     49.8  21.7  51.2     10.0 11.0 23.3
    144, 56x56, 3x3, bfloat16   69.1  61.5  24.9      16.4 17.1 19.3      529   472   330     12.0 14.3 20.0
    672, 14x14, 5x5, bfloat16   66.8  77.2  51.3       6.2  6.6  6.8      291   319   245      6.1  5.6 10.0

- Each pass runs in x's own layout; to convert would cost more than it gains. Contiguous maps go in slices although a
  whole one is faster in float32: oneDNN brings it to a layout of its own, which would be a copy of it in memory.
- 16-bit maps become float32 slice by slice, and a sum is rounded once. Matrix units are of no use here, so a CPU that
  has them does the same.
- The weight's gradient is itself a depthwise convolution, each image's with its gradient as the filter, stride and
  dilation swapped. oneDNN's forward kernel is several times as fast at that as its kernel for the purpose, save for 3x3
  in channels_last, and on CPUs with AVX-512 in either layout (144, 56x56, stride 2, float32: 1.0 ms against 1.4).
- oneDNN's fast forward kernel takes no border wider than BORDER where maps are contiguous or taps apart (a 31x31 filter
  took 15 times as long); so such a border is written out first. Its kernel for grad_x takes no dilation; a forward
  convolution with the filter turned round does.

Shapes as in reference.py.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.depthwise.reference import Pair, layout_of, new_input_gradient, new_output, wide

SLICE = 2**19  # numbers: 2 MiB of float32
LANES = 16  # channels are cut at multiples of this, the width of the widest vector
BORDER = 4

Part = tuple[slice, slice]  # of images, of channels


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As in reference.py."""
    dtype, product, layout = dtype or x.dtype, wide(x.dtype), layout_of(x)
    if not x.is_cpu:
        return forward_at_once(x, weight, bias, stride, padding, dilation, dtype)

    def convolve(part: Part) -> Tensor:
        w = weight[part[1]].to(product)
        b = None if bias is None else bias[part[1]].to(product)
        return convolution(dense(x[part], product, layout), w, b, stride, padding, dilation)

    def new() -> Tensor:
        return new_output(x, weight, stride, padding, dilation, dtype)

    return joined(parts(x, goes_whole(x, dilation)), convolve, new, dtype, layout)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As in reference.py."""
    if not x.is_cpu:
        return backward_at_once(grad, x, weight, stride, padding, dilation, needs)
    product, layout, kernel = wide(x.dtype), layout_of(x), weight.shape[2:]
    whole = goes_whole(x, dilation)
    grad_x = grad_weight = grad_bias = None
    if needs[0]:

        def by_x(part: Part) -> Tensor:
            g, w = dense(grad[part], product, layout), weight[part[1]].to(product)
            return input_gradient(g, x[part], w, stride, padding, dilation, layout)

        grad_x = joined(parts(x, whole), by_x, lambda: new_input_gradient(x), x.dtype, layout)
    if needs[1]:
        fast = max(kernel) <= 3 and max(dilation) == 1 and (layout == torch.channels_last or _has_avx512())
        layout, by_weight = (layout, weight_gradient) if fast else (torch.contiguous_format, correlation)
        grad_weight = weight.new_zeros(weight.shape, dtype=product)
        for part in parts(x, whole and fast):
            g, image = (dense(t[part], product, layout) for t in (grad, x))
            grad_weight[part[1]] += by_weight(g, image, kernel, stride, padding, dilation)
    if needs[2]:
        grad_bias = weight.new_zeros(len(weight), dtype=product)
        for part in parts(grad, False):
            grad_bias[part[1]] += grad[part].sum((0, 2, 3), dtype=product)
    return grad_x, grad_weight, grad_bias


@functools.cache
def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def goes_whole(x: Tensor, dilation: Pair) -> bool:
    """Whether x is as oneDNN takes it, which then neither converts nor copies."""
    layout = torch.channels_last
    as_it_is = layout_of(x) == layout and x.is_contiguous(memory_format=layout) and x.dtype == wide(x.dtype)
    return as_it_is and max(dilation) == 1


def parts(x: Tensor, whole: bool) -> list[Part]:
    """Slices of about SLICE numbers: some images, or some channels of one; all at once where `whole`."""
    if whole:
        return [(slice(None), slice(None))]
    batch, channels, area = *x.shape[:2], x.shape[2] * x.shape[3]
    images = max(SLICE // max(channels * area, 1), 1)
    some = max(SLICE // max(area, 1) // LANES * LANES, LANES) if images == 1 else channels
    return [
        (slice(i, i + images), slice(c, c + some)) for i in range(0, batch, images) for c in range(0, channels, some)
    ]


def joined(
    slices: list[Part],
    compute: Callable[[Part], Tensor],
    new: Callable[[], Tensor],
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> Tensor:
    """What `compute` makes of every slice, put into an empty tensor of `new`; one slice alone needs none."""
    if len(slices) == 1:
        return dense(compute(slices[0]), dtype, layout)
    out = new()
    for part in slices:
        out[part] = compute(part)
    return out


def dense(x: Tensor, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
    return x.to(dtype, memory_format=layout).contiguous(memory_format=layout)


def written_out(padding: Pair, dilation: Pair, layout: torch.memory_format) -> bool:
    """Whether the border is, for the sake of oneDNN's fast kernels. Where it is negative, it is cut off."""
    far = max(padding) > BORDER and (layout == torch.contiguous_format or max(dilation) > 1)
    return far or min(padding) < 0


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    if written_out(padding, dilation, layout_of(x)):
        x, padding = F.pad(x, (padding[1], padding[1], padding[0], padding[0])), (0, 0)
    return F.conv2d(x, weight, bias, stride, padding, dilation, len(weight))


def input_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, layout: torch.memory_format
) -> Tensor:
    """By oneDNN's kernel for it, or, where that is slow, a convolution of the gradient with the filter turned round."""
    if max(stride) == 1 and (layout == torch.contiguous_format or max(dilation) > 1):
        border = [d * (k - 1) - p for k, p, d in zip(weight.shape[2:], padding, dilation)]
        return convolution(grad, weight.flip(2, 3), None, (1, 1), border, dilation)
    if x.dtype != grad.dtype:
        x = torch.empty(x.shape, dtype=grad.dtype, memory_format=layout)  # only its shape is asked for
    return _derivatives(grad, x, weight, stride, padding, dilation, (True, False, False))[0]


def weight_gradient(grad: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    weight = grad.new_empty(x.shape[1], 1, *kernel)  # only its shape is asked for
    return _derivatives(grad, x, weight, stride, padding, dilation, (False, True, False))[1]


def correlation(grad: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """The weight's gradient: every channel of every image with its own gradient as the filter, summed over images."""
    if grad.shape[2] == grad.shape[3] == 1:
        # a 1x1 filter, which oneDNN leaves to a loop over all channels of all images: 250 ms where this takes 1
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
        taps = x[:, :, : dilation[0] * kernel[0] : dilation[0], : dilation[1] * kernel[1] : dilation[1]]
        return (grad * taps).sum(0)[:, None]
    rows = x.shape[0] * x.shape[1]
    filters = grad.reshape(rows, 1, *grad.shape[2:])
    taps = convolution(x.reshape(1, rows, *x.shape[2:]), filters, None, dilation, padding, stride)
    taps = taps[..., : kernel[0], : kernel[1]]  # a stride may leave room for more at the end
    return taps.reshape(*x.shape[:2], *kernel).sum(0)[:, None]


def _derivatives(grad, x, weight, stride, padding, dilation, needs):
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, dilation, False, (0, 0), len(weight), needs
    )


def forward_at_once(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, dtype: torch.dtype
) -> Tensor:
    """By the device's library, in `dtype`."""
    bias = None if bias is None else bias.to(dtype)
    out = F.conv2d(x.to(dtype), weight.to(dtype), bias, stride, padding, dilation, len(weight))
    return out.contiguous(memory_format=layout_of(x))


def backward_at_once(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """By the device's library, in grad's dtype; of cuDNN's kernels only those that give the same bits each time."""
    cudnn, dtype, layout = torch.backends.cudnn, grad.dtype, layout_of(x)
    grad = grad.contiguous(memory_format=layout)
    with cudnn.flags(cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, True, cudnn.allow_tf32):
        grad_x, grad_weight, _ = _derivatives(
            grad, x.to(dtype), weight.to(dtype), stride, padding, dilation, (needs[0], needs[1], False)
        )
    return (
        dense(grad_x, x.dtype, layout) if needs[0] else None,
        grad_weight.to(wide(dtype)) if needs[1] else None,
        grad.sum((0, 2, 3), dtype=wide(dtype)) if needs[2] else None,
    )
