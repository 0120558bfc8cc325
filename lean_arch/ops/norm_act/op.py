"""BatchNorm, activation and the convolution behind them, keeping for the backward pass nothing but BatchNorm's input.

A textbook block keeps BatchNorm's input, its result and the activation; the latter two follow from the first by a
multiplication an element. So `activate` hands on a stand-in for the activation, which holds no memory, and `convolve`
makes the activation from BatchNorm's input, some images at a time, forward and again backward. Even that input need not
be kept where a `Source` can compute it again.

Keeping only what a neighbour keeps is the idea of In-Place Activated BatchNorm (Rota Bulo et al. 2018, arXiv
1712.02616), which inverts the activation, and so takes invertible ones alone.

Shapes: x, z (B, C, H, W); weight, bias of a norm (C,); gate and pooled (B, C, 1, 1).
"""

import copy
import dataclasses
import importlib
from collections.abc import Iterator
from itertools import islice, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from lean_arch.ops import plain_convolution
from lean_arch.ops.backend import backend_for
from lean_arch.ops.derivatives import once_differentiable
from lean_arch.ops.norm_act import portable
from lean_arch.ops.norm_act.activations import ACTIVATIONS
from lean_arch.ops.norm_act.reference import Norm
from lean_arch.ops.plain_convolution import Geometry, arithmetic, result_dtype, slices, without_autocast

SLICE = 2**20  # bytes of a map that a backward pass works on at a time; smaller ones take more time, larger ones memory
ROOMS = {"reference": "reference", "torch": "portable", "triton": "kernels"}


def room(backend: str):
    """The module that holds a backend's `forward`, `activate` and `backward`."""
    return importlib.import_module(f"lean_arch.ops.norm_act.{ROOMS[backend]}")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How act(norm(z)) is made from z, which may be kept by nobody but a `source`.

    slopes: whether `convolve`, which has norm(z) at hand, multiplies the gradient by act's slopes.
    """

    weight: Tensor | None
    bias: Tensor | None
    norm: Norm
    source: "Source | None"
    slopes: bool

    def sloped(self, g: Tensor, z: Tensor) -> Tensor:
        """g * act'(norm(z)), in z's dtype, perhaps written over g."""
        u = portable.normalise(z, self.weight, self.bias, self.norm)
        return ACTIVATIONS[self.norm.act][1](g.to(z.dtype), u)

    def activate(self, z: Tensor) -> Tensor:
        return room(self.norm.backend).activate(z, self.weight, self.bias, self.norm)

    def tensors(self) -> tuple[Tensor | None, ...]:
        norm, source = self.norm, self.source
        return self.weight, self.bias, norm.mean, norm.rstd, norm.var, *(source.tensors() if source else ())

    def made_of(self, tensors: Iterator[Tensor | None]) -> "Recipe":
        weight, bias, mean, rstd, var = islice(tensors, 5)
        norm = dataclasses.replace(self.norm, mean=mean, rstd=rstd, var=var)
        return Recipe(weight, bias, norm, self.source and self.source.made_of(tensors), self.slopes)


class Activation(NamedTuple):
    """act(norm(z)) for one convolution.

    stand_in: of its shape, for autograd; values: of the forward pass, kept by nobody; pooled: means over the planes.
    """

    stand_in: Tensor
    values: Tensor
    pooled: Tensor | None
    recipe: Recipe


class Settings(NamedTuple):
    """Of a BatchNorm and its activation. batch: normalise by the batch's own mean and variance."""

    running_mean: Tensor | None
    running_var: Tensor | None
    batch: bool
    momentum: float
    eps: float
    act: str


class Source:
    """The result z of a convolution that is dropped after the forward pass and computed again in the backward pass.

    A graph keeps it without its `tensors`, which it saves as autograd's own, and makes it of those again: so they are
    offloaded, checkpointed, and refused where somebody wrote over them.
    """

    def __init__(self, z: Tensor, x: Tensor | Recipe, weight, bias, geometry: Geometry, gate: Tensor | None):
        self.memo, self.dtype, self.geometry, self.x = [z.detach()], z.dtype, geometry, x
        self.arguments = tuple(None if t is None else t.detach() for t in (weight, bias, gate))

    def tensors(self) -> tuple[Tensor | None, ...]:
        return *(self.x.tensors() if isinstance(self.x, Recipe) else (self.x,)), *self.arguments

    def made_of(self, tensors: Iterator[Tensor | None]) -> "Source":
        other = copy.copy(self)  # of the same memo
        other.x = self.x.made_of(tensors) if isinstance(self.x, Recipe) else next(tensors)
        other.arguments = tuple(islice(tensors, 3))
        return other

    def get(self) -> Tensor:
        """In a backward pass, which drops it at its end if nobody did before."""
        if not self.memo:
            torch.autograd.Variable._execution_engine.queue_callback(self.drop)
            with torch.no_grad():
                x = self.x.activate(self.x.source.get()) if isinstance(self.x, Recipe) else self.x
                weight, bias, gate = self.arguments
                self.memo.append(convolved(x, weight, bias, self.geometry, gate, self.dtype))
        return self.memo[0]

    def drop(self):
        self.memo.clear()


def batch_norm_act(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> Tensor:
    """act(norm(x)), (B, C, H, W) in x's dtype, as nn.BatchNorm2d computes it; keeps x alone.

    Raises ValueError where it would train on one value a channel.
    """
    values, norm = _first(x, weight, bias, settings)
    return _Activate.apply(x, weight, bias, norm, values, None, None)[0]


def activate(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
    pool: bool = False,
    source: "Source | None" = None,
) -> Activation:
    """act(norm(z)) for one `convolve`, and with `pool` its mean over each plane. With `source`, z is not kept.

    Raises ValueError where it would train on one value a channel.
    """
    values, norm = _first(z, weight, bias, settings)
    pooled = values.mean((2, 3), keepdim=True) if pool else None
    stand_in = z.detach()
    if source:
        stand_in = z.new_empty(()).expand(z.shape)
    # the gradient of the means, which is to be multiplied too, comes after `convolve`
    slopes = not pool and norm.backend == "torch" and norm.act != "identity"
    rest = dataclasses.replace(norm, act="identity") if slopes else norm
    stand_in, pooled = _Activate.apply(z, weight, bias, rest, stand_in, pooled, source or True)
    return Activation(stand_in, values, pooled, Recipe(weight, bias, norm, source, slopes))


def _first(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> tuple[Tensor, Norm]:
    if settings.batch and x.numel() == x.shape[1]:
        raise ValueError(
            f"BatchNorm cannot train on an input of shape {tuple(x.shape)}, one value a channel, whose variance is 0: "
            "take a batch_size above 1, larger images, or eval()"
        )
    for parameter in (weight, bias, settings.running_mean, settings.running_var):
        if parameter is not None and len(parameter) != x.shape[1]:
            raise ValueError(
                f"x {tuple(x.shape)} has {x.shape[1]} channels, but this BatchNorm is made for {len(parameter)}"
            )
    with torch.no_grad():
        return room(backend_for(x.device)).forward(x.detach(), weight, bias, *settings)


def convolve(
    x: Tensor | Activation, weight: Tensor, bias: Tensor | None, geometry: Geometry, gate: Tensor | None = None
) -> Tensor:
    """conv(x * gate), (B, O, Ho, Wo), in autocast's dtype if it is on; keeps x or what x is made from."""
    lazy = isinstance(x, Activation)
    stand_in, values, recipe = (x.stand_in, x.values, x.recipe) if lazy else (x, None, None)
    return _Convolve.apply(stand_in, gate, weight, bias, geometry, recipe, values)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, gate: Tensor | None, dtype) -> Tensor:
    """What `convolve` gives, in `dtype`, for values x."""
    with without_autocast(x):
        wide = arithmetic(dtype, x.device)
        weight, bias = weight.to(wide), None if bias is None else bias.to(wide)
        out, whole = None, wide == dtype
        for part in [slice(None)] if whole else slices(x):
            a = x[part] if gate is None else x[part] * gate[part]
            y = plain_convolution.forward(a.to(wide), weight, bias, geometry)
            if whole:
                return y
            if out is None:
                out = y.new_empty(x.shape[0], *y.shape[1:], dtype=dtype)
                if y.is_contiguous(memory_format=torch.channels_last):
                    out = out.contiguous(memory_format=torch.channels_last)
            out[part] = y
    return out


class _Activate(torch.autograd.Function):
    """(values, pooled), computed before, as functions of x, weight and bias.

    lean: None for values that anybody may see; else they are a stand-in, and x is kept, or is to be had from a Source.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, norm, values, pooled, lean):
        source = lean if isinstance(lean, Source) else None
        ctx.source = source and source.made_of(repeat(None))
        kept = source.tensors() if source else (x,)
        ctx.save_for_backward(weight, bias, norm.mean, norm.rstd, norm.var, *kept)
        ctx.of, ctx.lean = (norm.eps, norm.act, norm.backend), lean is not None
        # not views, which nobody could write over
        return values.detach(), None if pooled is None else pooled.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, pooled_grad):
        weight, bias, mean, rstd, var, *kept = ctx.saved_tensors
        source = ctx.source and ctx.source.made_of(iter(kept))
        x = source.get() if source else kept[0]
        # nobody but `convolve` sees a stand-in, so its gradient is ours to write over
        into = grad if ctx.lean and grad is not None else torch.empty_like(x)
        norm = Norm(mean, rstd, var, *ctx.of)
        of_x, of_weight, of_bias = room(norm.backend).backward(grad, pooled_grad, x, weight, bias, norm, into)
        if source:
            source.drop()
        of_weight = None if weight is None else of_weight.to(weight.dtype)
        return of_x, of_weight, None if bias is None else of_bias.to(bias.dtype), None, None, None, None


class _Convolve(torch.autograd.Function):
    """conv(x * gate), where x may stand for what `of` makes."""

    @staticmethod
    def forward(ctx, x, gate, weight, bias, geometry, of, values):
        ctx.dtype = result_dtype(x, weight.dtype)
        ctx.geometry, ctx.of = geometry, of and of.made_of(repeat(None))
        ctx.save_for_backward(None if of and of.source else x, gate, weight, bias, *(of.tensors() if of else ()))
        return convolved(x if values is None else values, weight, bias, geometry, gate, ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, gate, weight, bias, *kept = ctx.saved_tensors
        of = ctx.of and ctx.of.made_of(iter(kept))
        if x is None:
            x = of.source.get()
        needs_x, needs_gate, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        needs_a, slopes = needs_x or needs_gate, of is not None and of.slopes
        into = torch.empty_like(x) if needs_x else None
        of_gate = torch.empty_like(gate) if needs_gate else None
        sums = [None, None]  # gradients of weight and bias
        with without_autocast(x):
            wide = arithmetic(ctx.dtype, x.device)
            wide_weight = weight.to(wide)

            def backward(part: slice, a: Tensor, *needs: bool) -> tuple[Tensor | None, ...]:
                return plain_convolution.backward(grad[part].to(wide), a.to(wide), wide_weight, ctx.geometry, needs)

            def differentiate(part: slice):  # its own scope: nothing of a slice outlives it
                a = x[part] if of is None else of.activate(x[part])
                gated = a if gate is None else a * gate[part]
                if gate is None:
                    del a
                g, *shares = backward(part, gated, needs_a and not slopes, needs_weight, needs_bias)
                del gated
                if needs_a and slopes:  # the activation is gone when its gradient comes
                    g = backward(part, x[part], True, False, False)[0]
                for number, (share, parameter) in enumerate(zip(shares, (weight, bias))):
                    if share is not None:
                        first = sums[number] is None
                        sums[number] = share.to(parameter.dtype) if first else sums[number].add_(share)
                if needs_gate:
                    of_gate[part] = a.mul_(g).sum((2, 3), keepdim=True)
                if needs_x:
                    g = g if gate is None else g.mul_(gate[part])
                    into[part] = of.sloped(g, x[part]) if slopes else g

            for part in slices(x, elements=SLICE // wide.itemsize):
                differentiate(part)
        return into, of_gate, *sums, None, None, None
