"""Layers with a frozen weight and a trained sparse update, whose gradients are as small as the update.

y = x (W + sum of updates)^T + b, where no dense update, no dense gradient and no second weight ever exists: each update
adds its own product to y and to the gradient of x in place. For the backward pass Columns keep the inputs that they
multiply, Blocks those of the block columns that they touch, Rows and Entries x itself.

Sparse fine-tuning in this form: column-sparse after SparseLoCo-like masks, single entries after SHiRA (Bhardwaj et al.
2024, arXiv 2406.13175).

Shapes: x (..., C), weight (O, C), bias (O,), y (..., O).
"""

import math

import torch
from torch import Tensor

from lean_arch.ops.backend import backend_for
from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.plain_convolution import result_dtype, without_autocast
from lean_arch.ops.sparse_linear import linear, reference
from lean_arch.ops.sparse_linear.reference import Updates
from lean_arch.ops.sparse_linear.structures import Structure


def sparse_linear(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Updates) -> Tensor:
    """`F.linear(x, W + sum of updates, bias)` with W frozen.

    Args:
        x: (..., C), any float dtype, any strides.
        weight: (O, C), not trained. A quantised tensor that F.linear takes and that has `dequantize()` works too.
        bias: (O,), trained or not.
        updates: pairs of values and a structure that says where they lie; values of any float dtype.

    Returns:
        (..., O) in the dtype of F.linear.

    Raises ValueError where arguments do not fit each other, or where weight requires a gradient.
    """
    refuse_other_derivatives("sparse_linear", x, weight, bias, *(values for values, _ in updates))
    check(weight, updates)
    backend = _backend(x.device)
    if backend == "reference":
        return reference.linear(x, weight, bias, updates)
    parts = tuple(linear.PARTS[type(structure)](structure, backend) for _, structure in updates)
    return _Linear.apply(x, weight, bias, parts, *(values for values, _ in updates))


def check(weight: Tensor, updates: Updates, groups: int = 1):
    """Raises ValueError for what no layer takes."""
    if weight.requires_grad:
        raise ValueError("weight requires a gradient, but it gets none here; weight.requires_grad_(False) freezes it")
    for number, (values, structure) in enumerate(updates):
        if not isinstance(structure, Structure):
            kind = type(structure).__name__
            raise ValueError(f"updates[{number}] has {kind} for a structure; Columns, Rows, Blocks and Entries work")
        structure.check(weight.shape, groups)
        wanted = structure.values_shape(weight.shape, groups)
        if not isinstance(values, Tensor) or tuple(values.shape) != wanted or not values.is_floating_point():
            found = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"values of updates[{number}] must be a float tensor {wanted}, got {found}")


@torch.compiler.assume_constant_result
def _backend(device: torch.device) -> str:
    """Chosen when a function is compiled, not each time it runs."""
    return backend_for(device)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, parts, *values):
        dtype = result_dtype(x, x.dtype)
        ctx.parts, ctx.shapes = parts, (x.shape, x.dtype, weight.shape)
        ctx.bias = None if bias is None else bias.dtype
        x = x.to(dtype)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        kept = []
        with without_autocast(x):
            y = linear.forward(rows, weight, bias, dtype)
            for part, v in zip(parts, values):
                some = part.keep(rows)
                part.add_output(y, some, v.to(dtype))
                kept.append(x if some is rows else some)
        need = ctx.needs_input_grad
        kept = [some if needed else None for some, needed in zip(kept, need[4:])]
        ctx.save_for_backward(weight if need[0] else None, *values, *kept)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *saved = ctx.saved_tensors
        values, kept = saved[: len(ctx.parts)], saved[len(ctx.parts) :]
        x_shape, x_dtype, weight_shape = ctx.shapes
        g = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
        need_x, _, need_bias, _, *need_values = ctx.needs_input_grad
        with without_autocast(grad):
            grads = [
                part.of_values(g, some.reshape(len(g), some.shape[-1]), weight_shape).to(v.dtype) if need else None
                for part, some, v, need in zip(ctx.parts, kept, values, need_values)
            ]
            grad_bias = g.sum(0).to(ctx.bias) if need_bias else None
            grad_x = None
            if need_x:
                grad_x = linear.input_gradient(g, weight)
                for part, v in zip(ctx.parts, values):
                    part.add_input(grad_x, g, v.to(g.dtype))
                grad_x = grad_x.view(x_shape).to(x_dtype)
        return grad_x, None, grad_bias, None, *grads
