"""Depthwise convolution whose backward pass keeps x and weight and nothing else, 16-bit or not, autocast or not.

`F.conv2d(groups=C)` under autocast keeps a 16-bit copy of x beside x itself where x is float32, and sums the weight's
gradient in what its library takes; here every backend reads x as it is and sums in float32.

Shapes: x (B, C, H, W), weight (C, 1, kh, kw), bias (C,), result (B, C, OH, OW).
"""

import importlib

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_arch.ops.backend import backend_for
from lean_arch.ops.depthwise.reference import new_input_gradient, new_output
from lean_arch.ops.derivatives import refuse_other_derivatives

ROOMS = {"reference": "reference", "torch": "portable", "triton": "kernels"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def depthwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """`F.conv2d(x, weight, bias, stride, padding, dilation, groups=C)`: every channel with a filter of its own.

    Sums are made in float32 (float64 for float64), forward and backward. The same input gives the same bits. There is
    no second derivative.

    Args:
        x: (B, C, H, W), float32, float16, bfloat16 or float64, contiguous or channels_last (others are copied).
        weight: (C, 1, kh, kw), of x's dtype. Under autocast x, weight and bias may differ: no 16-bit copy is made of
            any, the result is of autocast's dtype, and gradients come in each tensor's own.
        bias: (C,), of x's dtype or float32.
        stride, padding, dilation: numbers, or pairs for height and width.

    Returns:
        (B, C, OH, OW) in x's memory layout, OH = (H + 2 padding - dilation (kh - 1) - 1) // stride + 1.

    Raises ValueError where arguments do not fit each other.
    """
    refuse_other_derivatives("depthwise_conv2d", x, weight, bias)
    stride, padding, dilation = (
        _pair(name, value, least)
        for name, value, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))
    )
    _check(x, weight, bias, padding, dilation)
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    return torch.ops.lean_arch.depthwise_conv2d(x, weight, bias, stride, padding, dilation, dtype, _backend(x.device))


def _pair(name: str, value, least: int) -> list[int]:
    pair = list(value) if isinstance(value, (tuple, list)) else [value, value]
    whole = all(isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool) for n in pair)
    if len(pair) != 2 or not whole or min(pair) < least:
        raise ValueError(f"{name} {value!r} must be a whole number or a pair of them, {least} or more")
    return pair


def _check(x, weight, bias, padding, dilation):
    for name, tensor, shape in (("x", x, "(B, C, H, W)"), ("weight", weight, "(C, 1, kh, kw)")):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor {shape}, got {found}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; float32, float16, bfloat16 and float64 work")
    channels, kernel = x.shape[1], weight.shape[2:]
    if channels == 0 or weight.shape[:2] != (channels, 1) or 0 in kernel:
        raise ValueError(
            f"weight is {tuple(weight.shape)}; for x {tuple(x.shape)} it takes ({channels}, 1, kh, kw), a filter for "
            "each channel (F.conv2d takes other groups)"
        )
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (channels,)):
        found = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias must be a tensor ({channels},), got {found}")
    autocast = torch.is_autocast_enabled(x.device.type)
    for name, tensor, more in (("weight", weight, ()), ("bias", bias, (torch.float32,))):
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")
        mixed = torch.float64 not in (x.dtype, tensor.dtype) and (autocast or tensor.dtype in more)
        if tensor.dtype != x.dtype and not (mixed and tensor.dtype in DTYPES):
            raise ValueError(f"{name} is {tensor.dtype}, but x is {x.dtype}; outside autocast they must be the same")
    for name, size, k, p, d in zip(("height", "width"), x.shape[2:], kernel, padding, dilation):
        if size + 2 * p < d * (k - 1) + 1:
            raise ValueError(
                f"weight spans {d * (k - 1) + 1} numbers of x's {name}, which is {size + 2 * p} with padding {p}; "
                "it takes as many or more"
            )


@torch.compiler.assume_constant_result
def _backend(device: torch.device) -> str:
    """Chosen when a function is compiled, not each time it runs."""
    return backend_for(device)


def room(backend: str):
    """The module that holds a backend's `forward` and `backward`."""
    return importlib.import_module(f"lean_arch.ops.depthwise.{ROOMS[backend]}")


@torch.library.custom_op("lean_arch::depthwise_conv2d", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # `dtype` has settled that
        return room(backend).forward(x, weight, bias, stride, padding, dilation, dtype)


@_forward.register_fake
def _(x, weight, bias, stride, padding, dilation, dtype, backend):
    return new_output(x, weight, stride, padding, dilation, dtype)


@torch.library.custom_op("lean_arch::depthwise_conv2d_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        grads = room(backend).backward(grad, x, weight, stride, padding, dilation, needs)
    return tuple(x.new_empty(0) if g is None else g.to(t.dtype) for g, t in zip(grads, (x, weight, bias)))


@_backward.register_fake
def _(grad, x, weight, bias, stride, padding, dilation, backend, needs):
    return (
        new_input_gradient(x) if needs[0] else x.new_empty(0),
        weight.new_empty(weight.shape) if needs[1] else x.new_empty(0),
        bias.new_empty(bias.shape) if needs[2] else x.new_empty(0),
    )


def _remember(ctx, inputs, output):
    x, weight, bias, stride, padding, dilation, _, backend = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.options = stride, padding, dilation, backend


def _differentiate(ctx, grad):
    needs = list(ctx.needs_input_grad[:3])
    grads = torch.ops.lean_arch.depthwise_conv2d_backward(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *(g if need else None for g, need in zip(grads, needs)), *[None] * 5


_forward.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx, *grads):
    raise RuntimeError("depthwise_conv2d cannot be differentiated twice; F.conv2d can")


_backward.register_autograd(_refuse)


@register_flop_formula(torch.ops.lean_arch.depthwise_conv2d)
def _forward_flops(x_shape, weight_shape, *others, out_shape=None) -> int:
    return 2 * _products(out_shape, weight_shape)


@register_flop_formula(torch.ops.lean_arch.depthwise_conv2d_backward)
def _backward_flops(grad_shape, x_shape, weight_shape, *others, out_shape=None) -> int:
    needs = others[-1]
    return 2 * _products(grad_shape, weight_shape) * (needs[0] + needs[1])


def _products(y_shape, weight_shape) -> int:
    batch, channels, height, width = y_shape
    return batch * channels * height * width * weight_shape[2] * weight_shape[3]
