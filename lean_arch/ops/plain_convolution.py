"""A convolution and its gradients by the fastest path this processor has, for operators that differentiate by hand.

A CPU without 16-bit arithmetic convolves bfloat16 3 to 10 times as slowly as float32 (two cores, torch 2.14, 1x1,
8x24x56x56 to 144 channels: 188 ms against 32), and float32 is the more exact; so it is told to convert first.

Shapes: x (B, C, H, W), weight (O, C / groups, kh, kw), bias (O,), y (B, O, Ho, Wo).
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lean_arch.ops.backend import backend_for
from lean_arch.ops.depthwise import portable
from lean_arch.ops.depthwise.op import room


class Geometry(NamedTuple):
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def result_dtype(x: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of a product under today's autocast, which leaves float64 alone."""
    kind = "cpu" if x.is_meta else x.device.type
    lowers = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lowers else otherwise


def without_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def arithmetic(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to convolve tensors of `dtype` in."""
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) and not _has_arithmetic(dtype):
        return torch.float32
    return dtype


@functools.cache
def _has_arithmetic(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def slices(x: Tensor, dim: int = 0, elements: int = 2**19, width: int = 1) -> Iterator[slice]:
    """Of a dimension of `x`, so that on a CPU a slice of the work stays in a cache; elsewhere 2^26 elements each.

    elements: of a slice on a CPU; width: elements there are to one of x's last dimension, if not one.
    """
    size = x.shape[dim]
    total = x.numel() if width == 1 else x.numel() // max(x.shape[-1], 1) * width
    each = max((elements if x.is_cpu else 2**26) * size // max(total, 1), 1)
    for start in range(0, size, each):
        yield slice(start, min(start + each, size))


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    if is_depthwise(weight, geometry):
        if x.is_cuda:
            return room(backend_for(x.device)).forward(x, weight, bias, *geometry[:3])
        if x.is_cpu:
            return portable.convolution(x, weight, bias, *geometry[:3])
    return torch.conv2d(x, weight, bias, *geometry)


def backward(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, needs: tuple[bool, bool, bool]):
    """Gradients of (x, weight, bias), None for those that nobody `needs`."""
    stride, padding, dilation, groups = geometry
    if is_depthwise(weight, geometry) and x.is_cuda:
        return room(backend_for(x.device)).backward(grad, x, weight, *geometry[:3], needs)
    others = ()
    if is_depthwise(weight, geometry) and x.is_cpu:
        # oneDNN's kernel for the weight is slow; that for x stays, to the bit
        _, *others = portable.backward(grad, x, weight, stride, padding, dilation, (False, *needs[1:]))
        needs = needs[0], False, False
    of_x, *rest = torch.ops.aten.convolution_backward(
        grad, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0, 0], groups, list(needs)
    )
    return of_x, *(others or rest)


def is_depthwise(weight: Tensor, geometry: Geometry) -> bool:
    return geometry.groups > 1 and geometry.groups == weight.shape[0] and weight.shape[1] == 1
