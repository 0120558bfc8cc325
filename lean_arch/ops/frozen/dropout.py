"""Dropout that keeps one bit a number: whether it stayed.

PyTorch keeps a number of x's own width on a CPU, a byte on a GPU.

Shapes: x of any shape, and a result of its shape.
"""

import torch
from torch import Tensor

from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.frozen.packing import dense, flat, in_layout, pack, parts_of, unpack


def packed_dropout(x: Tensor, p: float = 0.5) -> Tensor:
    """F.dropout(x, p) in training, of the same random numbers, to the bit. There is no second derivative.

    Raises ValueError where p is not between 0 and 1; at those ends F.dropout draws nothing and keeps next to nothing.
    """
    refuse_other_derivatives("packed_dropout", x)
    if not 0 < p < 1:
        raise ValueError(f"p {p!r} must be between 0 and 1; F.dropout takes these too")
    return _Dropout.apply(x, p)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        out, stays = torch.native_dropout(x, p, True)
        stays = dense(stays)
        ctx.strides, ctx.p = stays.stride(), p
        ctx.save_for_backward(pack(stays, 1, lambda part: part.view(torch.uint8)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (packed,) = ctx.saved_tensors
        grad = in_layout(grad, ctx.strides)
        into = torch.empty_like(grad)
        for part in parts_of(grad):
            factor = unpack(packed, part, 1).to(grad.dtype).div_(1 - ctx.p)
            flat(into)[part] = factor.mul_(flat(grad)[part])
        return into, None
