"""LayerNorm over channels whose backward pass keeps x and weight and nothing else.

F.layer_norm of a permuted map copies the whole of it where the channels of a pixel do not lie side by side, forward
and again backward; and autocast on a GPU keeps a float32 copy of a 16-bit map. Here x is read as it is.

Shapes: x and result (B, C, H, W); weight, bias (C,).
"""

import importlib
from numbers import Real

import torch
from torch import Tensor

from lean_arch.ops.backend import backend_for
from lean_arch.ops.derivatives import refuse_other_derivatives
from lean_arch.ops.layer_norm2d.reference import new_map

ROOMS = {"reference": "reference", "torch": "portable", "triton": "kernels"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def layer_norm2d(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Each pixel's channels, less their mean, over the root of their variance + eps; times weight, plus bias.

    `F.layer_norm` over dimension 1 (Ba et al. 2016, arXiv 1607.06450), with sums in float32 (float64 for float64),
    autocast or not. The same input gives the same bits. There is no second derivative.

    Args:
        x: (B, C, H, W), float32, float16, bfloat16 or float64, of any strides.
        weight, bias: (C,), of x's dtype or another but float64; None: 1 and 0.
        eps: 0 or more.

    Returns:
        (B, C, H, W) in x's dtype, channels_last, as the permuted result of F.layer_norm is.

    Raises ValueError where arguments do not fit each other.
    """
    refuse_other_derivatives("layer_norm2d", x, weight, bias)
    check(x, weight, bias, eps)
    return torch.ops.lean_arch.layer_norm2d(x, weight, bias, eps, _backend(x.device))


def check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float):
    """Raises ValueError for what `layer_norm2d` does not take."""
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] == 0:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a tensor (B, C, H, W) of one channel or more, got {found}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}; float32, float16, bfloat16 and float64 work")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != x.shape[1:2]:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor ({x.shape[1]},), one number a channel of x, got {found}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")
        if tensor.dtype not in DTYPES or (tensor.dtype != x.dtype and torch.float64 in (tensor.dtype, x.dtype)):
            raise ValueError(f"{name} is {tensor.dtype}, but x is {x.dtype}; {name}.to({x.dtype}) works")
    if not isinstance(eps, Real) or not eps >= 0:
        raise ValueError(f"eps {eps!r} must be a number, 0 or more")


@torch.compiler.assume_constant_result
def _backend(device: torch.device) -> str:
    """Chosen when a function is compiled, not each time it runs."""
    return backend_for(device)


def room(backend: str):
    """The module that holds a backend's `forward` and `backward`."""
    return importlib.import_module(f"lean_arch.ops.layer_norm2d.{ROOMS[backend]}")


@torch.library.custom_op("lean_arch::layer_norm2d", mutates_args=())
def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str) -> Tensor:
    return room(backend).forward(x, weight, bias, eps).detach()  # not a view, which nobody could write over


@_forward.register_fake
def _(x, weight, bias, eps, backend):
    return new_map(x)


@torch.library.custom_op("lean_arch::layer_norm2d_backward", mutates_args=())
def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    grads = room(backend).backward(grad, x, weight, bias, eps, needs)
    return tuple(x.new_empty(0) if g is None else g.to(t.dtype) for g, t in zip(grads, (x, weight, bias)))


@_backward.register_fake
def _(grad, x, weight, bias, eps, backend, needs):
    return (
        new_map(x) if needs[0] else x.new_empty(0),
        torch.empty_like(weight) if needs[1] else x.new_empty(0),
        torch.empty_like(bias) if needs[2] else x.new_empty(0),
    )


def _remember(ctx, inputs, output):
    x, weight, bias, ctx.eps, ctx.backend = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate(ctx, grad):
    needs = list(ctx.needs_input_grad[:3])
    grads = torch.ops.lean_arch.layer_norm2d_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.backend, needs)
    return *(g if need else None for g, need in zip(grads, needs)), None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx, *grads):
    raise RuntimeError("layer_norm2d cannot be differentiated twice; F.layer_norm can")


_backward.register_autograd(_refuse)
