"""Activations that are linear in pieces of two slopes, keeping one bit a number: which of the slopes it met.

PyTorch keeps the result, which nobody else needs where the next layer is frozen. The bits are found and read by
PyTorch's own derivative kernels, so that what happens at the corners and with NaN is the same.

Shapes: x of any shape, and a result of its shape.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.frozen.packing import dense, flat, in_layout, pack, parts_of, unpack

aten = torch.ops.aten


def frozen_relu(x: Tensor, inplace: bool = False) -> Tensor:
    """F.relu(x, inplace), to the bit, gradient too; keeps 1 bit a number. There is no second derivative."""
    refuse_other_derivatives("frozen_relu", x)
    return _TwoSlopes.apply(x, partial(F.relu, inplace=inplace), _is_positive, _pass_or_stop)


def frozen_hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """F.hardtanh, to the bit, gradient too; keeps 1 bit a number. ReLU6 has the bounds 0 and 6.

    There is no second derivative. Raises ValueError where min_val is above max_val.
    """
    refuse_other_derivatives("frozen_hardtanh", x)
    call = partial(F.hardtanh, min_val=min_val, max_val=max_val, inplace=inplace)
    is_inside = lambda ones, part: aten.hardtanh_backward(ones, part, min_val, max_val)  # noqa: E731
    return _TwoSlopes.apply(x, call, is_inside, _pass_or_stop)


def frozen_leaky_relu(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """F.leaky_relu, to the bit, gradient too; keeps 1 bit a number. There is no second derivative."""
    refuse_other_derivatives("frozen_leaky_relu", x)
    call = partial(F.leaky_relu, negative_slope=negative_slope, inplace=inplace)
    is_positive = lambda ones, part: aten.leaky_relu_backward(ones, part, 0.0, False)  # noqa: E731

    def differentiate(grad, bits, into):
        aten.leaky_relu_backward(grad, bits, negative_slope, False, grad_input=into)

    return _TwoSlopes.apply(x, call, is_positive, differentiate)


def _is_positive(ones, part):
    return aten.threshold_backward(ones, part, 0)


def _pass_or_stop(grad, bits, into):
    aten.threshold_backward(grad, bits, 0, grad_input=into)


class _TwoSlopes(torch.autograd.Function):
    """call(x). bits: 1 or 0 for each number of a slice; differentiate: from them, a slice of the input's gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, call: Callable, bits: Callable, differentiate: Callable):
        ctx.strides, ctx.differentiate = dense(x).stride(), differentiate
        ctx.save_for_backward(pack(dense(x), 1, lambda part: bits(torch.ones_like(part), part).to(torch.uint8)))
        out = call(x)
        if out is x:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (packed,) = ctx.saved_tensors
        grad = in_layout(grad, ctx.strides)
        into = torch.empty_like(grad)
        for part in parts_of(grad):
            ctx.differentiate(flat(grad)[part], unpack(packed, part, 1).to(grad.dtype), flat(into)[part])
        return into, None, None, None
