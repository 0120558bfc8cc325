"""LayerNorm over channels and the convolution behind it, or before it, from the input of the pair alone.

Between the stages of a ConvNeXt (Liu et al. 2022, arXiv 2201.03545) a textbook layer keeps the norm's input, which
nobody else needs, and its result for the convolution; its stem keeps the convolution's result for the norm. Here the
backward pass makes what lies between the two again, some images at a time.

Shapes: x (B, C, H, W); filters (O, C / groups, kh, kw), offset (O,) or None; weight, bias of the norm (C,) where it
comes first, else (O,), or None; result (B, O, Ho, Wo).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_arch.ops import plain_convolution
from lean_arch.ops.backend import backend_for
from lean_arch.ops.derivatives import once_differentiable
from lean_arch.ops.layer_norm2d.op import check, room
from lean_arch.ops.layer_norm2d.reference import new_map
from lean_arch.ops.norm_act.op import convolved
from lean_arch.ops.plain_convolution import Geometry, arithmetic, result_dtype, slices, without_autocast


def norm_convolve(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    filters: Tensor,
    offset: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    """conv(layer_norm2d(x)), in autocast's dtype if it is on. Raises ValueError where the norm does not fit x."""
    check(x, weight, bias, eps)
    return _NormConvolve.apply(x, weight, bias, filters, offset, eps, geometry)


def convolve_norm(
    x: Tensor,
    filters: Tensor,
    offset: Tensor | None,
    geometry: Geometry,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """layer_norm2d(conv(x)), in autocast's dtype if it is on. Raises ValueError where the norm does not fit."""
    return _ConvolveNorm.apply(x, filters, offset, weight, bias, eps, geometry)


class _NormConvolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, filters, offset, eps, geometry):
        ctx.dtype, ctx.eps, ctx.geometry = result_dtype(x, filters.dtype), eps, geometry
        ctx.save_for_backward(x, weight, bias, filters, offset)
        return convolved(_norm(x).forward(x, weight, bias, eps), filters, offset, geometry, None, ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, filters, offset = ctx.saved_tensors
        needs, norm, into = ctx.needs_input_grad[:5], _norm(x), new_map(x)
        sums = _Sums((weight, bias, filters, offset))
        with without_autocast(x):
            wide = arithmetic(ctx.dtype, x.device)
            taps = filters.to(wide)

            def differentiate(part: slice):  # its own scope: nothing of a slice outlives it
                u = norm.forward(x[part], weight, bias, ctx.eps).to(wide)
                g, *of_filters = plain_convolution.backward(
                    grad[part].to(wide), u, taps, ctx.geometry, (any(needs[:3]), *needs[3:])
                )
                del u
                of_norm = None, None
                if g is not None:
                    of_x, *of_norm = norm.backward(g, x[part], weight, bias, ctx.eps, needs[:3])
                    if of_x is not None:
                        into[part] = of_x
                sums.add(*of_norm, *of_filters)

            for part in slices(x):
                differentiate(part)
        return into if needs[0] else None, *sums.totals, None, None


class _ConvolveNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, filters, offset, weight, bias, eps, geometry):
        ctx.dtype, ctx.eps, ctx.geometry = result_dtype(x, filters.dtype), eps, geometry
        ctx.save_for_backward(x, filters, offset, weight, bias)
        z = convolved(x, filters, offset, geometry, None, ctx.dtype)
        check(z, weight, bias, eps)
        return _norm(x).forward(z, weight, bias, eps).detach()  # not a view, which nobody could write over

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, filters, offset, weight, bias = ctx.saved_tensors
        needs, norm = ctx.needs_input_grad[:5], _norm(x)
        into = torch.empty_like(x) if needs[0] else None
        sums = _Sums((filters, offset, weight, bias))
        with without_autocast(x):
            wide = arithmetic(ctx.dtype, x.device)
            taps = filters.to(wide)

            def differentiate(part: slice):
                z = convolved(x[part], filters, offset, ctx.geometry, None, ctx.dtype)
                g, *of_norm = norm.backward(grad[part], z, weight, bias, ctx.eps, (any(needs[:3]), *needs[3:]))
                del z
                of_filters = None, None
                if g is not None:
                    of_x, *of_filters = plain_convolution.backward(
                        g.to(wide), x[part].to(wide), taps, ctx.geometry, needs[:3]
                    )
                    if of_x is not None:
                        into[part] = of_x
                sums.add(*of_filters, *of_norm)

            for part in slices(grad):
                differentiate(part)
        return into, *sums.totals, None, None


class _Sums:
    """Gradients of parameters, each in its dtype, over slices of the batch."""

    def __init__(self, parameters: Sequence[Tensor | None]):
        self.parameters, self.totals = parameters, [None] * len(parameters)

    def add(self, *shares: Tensor | None):
        for number, (share, parameter) in enumerate(zip(shares, self.parameters)):
            if share is not None:
                total = self.totals[number]
                self.totals[number] = share.to(parameter.dtype) if total is None else total.add_(share)


def _norm(x: Tensor):
    return room(backend_for(x.device))
