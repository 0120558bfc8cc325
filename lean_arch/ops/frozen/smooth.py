"""Smooth activations whose backward pass keeps their slope in 8, 4 or 2 bits; the forward pass is exact.

PyTorch keeps the input, 16 or 32 bits a number, and of activations that are made of several operators more. The
gradient is the incoming one times the slope, which lies between fixed bounds, so that it can be kept on a grid:

- 8 bits: even steps between the least slope and the largest, 0 and 1 among them. No slope is off by more than half a
  step: 0.0025 for GELU and for SiLU.
- 4 and 2 bits: the 16 or 4 levels of least mean square error where inputs are N(0, 1).

Gradients of GELU by them are off by 0.2, 3 and 13% of their norm there. ReGELU2 (Yang et al., "Reducing Fine-Tuning
Memory Overhead by Approximate and Memory-Sharing Backpropagation", 2024, arXiv 2406.16282) gives one slope to each of
four intervals of the input, 2 bits too: 36%.

Shapes: x of any shape, and a result of its shape.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.frozen.packing import dense, flat, in_layout, pack, parts_of, unpack

aten = torch.ops.aten
BITS = 8, 4, 2
FINE = 254  # steps of a grid in 8 bits, one less than there is room for, because its ends are rounded


class Smooth(NamedTuple):
    """An activation, and its slope from (ones, x)."""

    call: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


SMOOTH = {
    "gelu": Smooth(F.gelu, aten.gelu_backward),
    "gelu_tanh": Smooth(
        functools.partial(F.gelu, approximate="tanh"), functools.partial(aten.gelu_backward, approximate="tanh")
    ),
    "quick_gelu": Smooth(_quick_gelu, lambda ones, x: aten.silu_backward(ones, 1.702 * x)),
    "silu": Smooth(F.silu, aten.silu_backward),
    "mish": Smooth(F.mish, aten.mish_backward),
    "hardswish": Smooth(F.hardswish, aten.hardswish_backward),
    "tanh": Smooth(torch.tanh, lambda ones, x: aten.tanh_backward(ones, x.tanh())),
    "sigmoid": Smooth(torch.sigmoid, lambda ones, x: aten.sigmoid_backward(ones, x.sigmoid())),
}


class Grid(NamedTuple):
    """Slopes s as codes round(s * steps) - least, in fewer bits as coarse[those]; levels: what codes stand for."""

    bits: int
    steps: int
    least: int
    coarse: tuple[int, ...]
    levels: tuple[float, ...]


@functools.cache
def grid_of(name: str, bits: int) -> Grid:
    """For the activation `name`. Raises ValueError where the number of bits is unknown."""
    if bits not in BITS:
        raise ValueError(f"bits {bits!r} must be 8, 4 or 2")
    with _disable_current_modes():  # of fake tensors, which have no numbers
        x = torch.linspace(-12, 12, 2**12 + 1, dtype=torch.float64)
        slopes = SMOOTH[name].slope(torch.ones_like(x), x)
        low, high = slopes.min().item(), slopes.max().item()
        steps = int(FINE / (high - low))
        least = round(low * steps)
        fine = torch.arange(least, least + 256, dtype=torch.float64) / steps
        if bits == 8:
            return Grid(bits, steps, least, (), tuple(fine.tolist()))
        levels = _least_squares(slopes, (-x.square() / 2).exp(), 2**bits)
        nearest = (fine[:, None] - levels).abs().argmin(1)
        return Grid(bits, steps, least, tuple(nearest.tolist()), tuple(levels.tolist()))


def _least_squares(values: Tensor, weights: Tensor, number: int) -> Tensor:
    """Levels that values of these weights are nearest to, by Lloyd's algorithm."""
    levels = torch.linspace(values.min().item(), values.max().item(), number, dtype=values.dtype)
    for _ in range(200):
        nearest = F.one_hot((values[:, None] - levels).abs().argmin(1), number) * weights[:, None]
        levels = (nearest * values[:, None]).sum(0) / nearest.sum(0)
    return levels


def frozen_activation(
    x: Tensor, name: str, bits: int | None = None, call: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The activation `name` of x, to the bit; keeps x, or of each number's slope `bits` bits.

    Args:
        name: "gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "hardswish", "tanh" or "sigmoid".
        bits: 8, 4 or 2, for a gradient by slopes on a grid; None keeps x, for one that differs by rounding.
        call: what computes it, with `bits` perhaps in place; None: PyTorch's function.

    There is no second derivative. Raises ValueError for another name or number of bits.
    """
    refuse_other_derivatives("frozen_activation", x)
    if name not in SMOOTH:
        raise ValueError(f"activation {name!r} is unknown; {', '.join(SMOOTH)} are known")
    activation = SMOOTH[name]
    grid = None if bits is None else grid_of(name, bits)
    return _Smooth.apply(x, call or activation.call, activation.slope, grid)


class _Smooth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call, slope, grid):
        ctx.strides, ctx.slope, ctx.bits = dense(x).stride(), slope, grid and grid.bits
        kept, levels = x, None
        if grid is not None:
            levels = torch.tensor(grid.levels, device=x.device)
            coarse = torch.tensor(grid.coarse, device=x.device, dtype=torch.uint8)

            def encode(part):
                codes = _slopes(slope, part).mul_(grid.steps).round_().sub_(grid.least).to(torch.uint8)
                return codes if grid.bits == 8 else coarse.index_select(0, codes.int())

            kept = pack(dense(x), grid.bits, encode)
        ctx.save_for_backward(kept, levels)
        out = call(x)
        if out is x:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        kept, levels = ctx.saved_tensors
        grad = in_layout(grad, ctx.strides)
        into = torch.empty_like(grad)
        x = flat(dense(kept)) if levels is None else None
        for part in parts_of(grad):
            if levels is None:
                slopes = _slopes(ctx.slope, x[part])
            else:
                slopes = levels.index_select(0, unpack(kept, part, ctx.bits).int())
            flat(into)[part] = slopes.mul_(flat(grad)[part])
        return into, None, None, None


def _slopes(slope, part):
    part = part.to(torch.promote_types(part.dtype, torch.float32))
    return slope(torch.ones_like(part), part)
