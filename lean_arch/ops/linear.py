"""Dense layers in bf16 on a CPU that has no bf16 arithmetic: the same products, in the layout its kernel is fast in.

oneDNN takes no bf16 matrix product there, and PyTorch's own kernel is fast only where it reads both factors along
their rows. The gradient of a layer's input, grad @ weight, is not such a product; with the weight transposed in
memory first it is. Two cores without AVX-512, torch 2.14, grad (1576, 1536), weight (1536, 384), bf16: 1.11 s as
autograd computes it, 0.20 s with the transposed copy, which lives no longer than the product.

Shapes: x (..., I), weight (O, I), bias (O,), output (..., O).
"""

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class _Linear(torch.autograd.Function):
    """F.linear of 16-bit tensors, whose input gradient is a product along rows."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = F.linear(grad, weight.t().contiguous()) if needs_x else None
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        return grad_x, grad_weight, rows.sum(0) if needs_bias else None


class _RowwiseLinears(TorchFunctionMode):
    def __init__(self, share_casts: bool):
        super().__init__()
        self.casts = {} if share_casts else None  # of parameters

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            return self.linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def linear(self, input, weight, bias=None):
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        plain = not (input.is_cpu and weight.is_cpu) or {input.dtype, weight.dtype} - {torch.float32, torch.bfloat16}
        if plain or not (autocast or input.dtype == weight.dtype == torch.bfloat16):
            return F.linear(input, weight, bias)
        return _Linear.apply(input.to(torch.bfloat16), self.cast(weight), None if bias is None else self.cast(bias))

    def cast(self, parameter):
        if self.casts is None or parameter.dtype == torch.bfloat16:
            return parameter.to(torch.bfloat16)
        if parameter not in self.casts:
            self.casts[parameter] = parameter.to(torch.bfloat16)
        return self.casts[parameter]


@functools.cache
def _emulated() -> bool:
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def rowwise_linears(share_casts: bool = False) -> contextlib.AbstractContextManager:
    """Within, F.linear in bf16 on the CPU differentiates by products along rows, where the CPU gains by it.

    With `share_casts` a weight is cast once for all calls within; their gradients of it must then not meet in one
    backward pass, which would add them up in bf16. A compiler, which has products of its own, is left to them.
    """
    if torch.compiler.is_compiling() or not _emulated():
        return contextlib.nullcontext()
    return _RowwiseLinears(share_casts)
