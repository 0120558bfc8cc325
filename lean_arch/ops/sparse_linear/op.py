"""Layers with a frozen weight and a trained sparse update, whose gradients are as small as the update.

y = x (W + sum of updates)^T + b, where no dense update, no dense gradient and no second weight ever exists: each update
adds its own product to y and to the gradient of x in place. For the backward pass Columns keep the inputs that they
multiply, Blocks those of the block columns that they touch, Rows and Entries x itself.

Training some entries of each weight: Sung et al. 2021 (arXiv 2111.09839), Bhardwaj et al. 2024 (arXiv 2406.13175).

Shapes: linear: x (..., C), weight (O, C), y (..., O); convolution: x (B, C, H, W), weight (O, C / groups, kh, kw),
y (B, O, Ho, Wo); embedding: ids of any shape, weight (V, D), y (..., D); bias (O,).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.backend import backend_for
from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.plain_convolution import Geometry, result_dtype, without_autocast
from lean_arch.ops.sparse_linear import embedding, reference
from lean_arch.ops.sparse_linear.check import (
    check_convolution,
    check_embedding,
    check_linear,
    check_updates,
    check_window,
    pairs_of,
)
from lean_arch.ops.sparse_linear.layers import Convolution, Linear
from lean_arch.ops.sparse_linear.parts import part_of
from lean_arch.ops.sparse_linear.reference import Updates
from lean_arch.ops.sparse_linear.structures import Entries


def sparse_linear(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Updates) -> Tensor:
    """`F.linear(x, weight + sum of updates, bias)` with the weight frozen.

    On a CPU without 16-bit arithmetic 16-bit products are made in float32. There is no second derivative.

    Args:
        x: (..., C), float32, float16, bfloat16 or float64, of any strides.
        weight: (O, C) of x's dtype (under autocast of any), not trained. A quantised tensor that F.linear takes and
            that has `dequantize()` works too.
        bias: (O,), trained or not.
        updates: pairs of values and a structure that says where they lie; values of any float dtype.

    Returns:
        (..., O) in the dtype that F.linear gives.

    Raises ValueError where arguments do not fit each other, or where weight requires a gradient.
    """
    refuse_other_derivatives("sparse_linear", x, weight, bias, *(values for values, _ in updates))
    check_linear(x, weight, bias)
    check_updates(weight, updates)
    if (backend := _backend(x.device)) == "reference":
        return reference.linear(x, weight, bias, updates)
    return _updated(Linear(), x, weight, bias, updates, 1, backend)


def sparse_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    updates: Updates,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d(x, weight + sum of updates, bias, stride, padding, dilation, groups)` with the weight frozen.

    Args:
        x: (B, C, H, W), float32, float16, bfloat16 or float64.
        weight: (O, C / groups, kh, kw) of x's dtype (under autocast of any), not trained.
        bias, updates: as in `sparse_linear`. With groups > 1 Columns and Rows name whole groups; Blocks do not go.
        stride, padding, dilation: numbers, or pairs for height and width; padding "valid" and "same" too.

    Returns:
        (B, O, Ho, Wo) in the dtype that F.conv2d gives.

    Raises ValueError where arguments do not fit each other, or where weight requires a gradient.
    """
    refuse_other_derivatives("sparse_conv2d", x, weight, bias, *(values for values, _ in updates))
    check_convolution(x, weight, bias, groups)
    check_updates(weight, updates, groups)
    stride, padding, dilation = pairs_of(stride, padding, dilation, weight)
    if padding == "same":  # by half of it on either side, and one more after, where it is odd
        both = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
        x = F.pad(x, (0, both[1] % 2, 0, both[0] % 2)) if any(n % 2 for n in both) else x
        padding = tuple(n // 2 for n in both)
    check_window(x, weight, padding, dilation)
    geometry = Geometry(stride, padding, dilation, groups)
    if (backend := _backend(x.device)) == "reference":
        return reference.conv2d(x, weight, bias, updates, *geometry)
    return _updated(Convolution(geometry), x, weight, bias, updates, groups, backend)


def sparse_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    updates: Updates,
    stride: int | tuple[int] = 1,
    padding: int | tuple[int] | str = 0,
    dilation: int | tuple[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`sparse_conv2d` over one dimension: x (B, C, L), weight (O, C / groups, k), result (B, O, Lo)."""
    if x.dim() != 3 or weight.dim() != 3:
        raise ValueError(f"x (B, C, L) and weight (O, C, k) have 3 dimensions, got {x.dim()} and {weight.dim()}")
    check_updates(weight, updates, groups)
    updates = [(values if isinstance(s, Entries) else values[..., None, :], s) for values, s in updates]
    stride, dilation, padding = (
        n if isinstance(n, str) else (other, *n) if isinstance(n, tuple) else (other, n)
        for n, other in ((stride, 1), (dilation, 1), (padding, 0))
    )
    y = sparse_conv2d(x[:, :, None], weight[:, :, None], bias, updates, stride, padding, dilation, groups)
    return y[:, :, 0]


def sparse_embedding(ids: Tensor, weight: Tensor, updates: Updates, padding_idx: int | None = None) -> Tensor:
    """`F.embedding(ids, weight + sum of updates, padding_idx)` with the weight frozen.

    Args:
        ids: of any shape, int64 or int32, from 0 to V - 1.
        weight: (V, D), not trained.
        updates: as in `sparse_linear`.
        padding_idx: a row of the weight, whose values get no gradient.

    Returns:
        (*ids.shape, D) in weight's dtype.

    Raises ValueError where arguments do not fit each other, or where weight requires a gradient.
    """
    refuse_other_derivatives("sparse_embedding", weight, *(values for values, _ in updates))
    padding_idx = check_embedding(ids, weight, padding_idx)
    check_updates(weight, updates)
    if _backend(weight.device) == "reference":
        return reference.embedding(ids, weight, updates, padding_idx)
    updates = [(values, structure) for values, structure in updates if values.numel()]
    structures = tuple(structure for _, structure in updates)
    return _Embedding.apply(ids, weight, padding_idx, structures, *(values for values, _ in updates))


@torch.compiler.assume_constant_result
def _backend(device: torch.device) -> str:
    """Chosen when a function is compiled, not each time it runs."""
    return backend_for(device)


def _updated(layer, x, weight, bias, updates, groups, backend):
    updates = [(values, structure) for values, structure in updates if values.numel()]
    parts = tuple(part_of(structure, layer, weight.shape, groups, backend) for _, structure in updates)
    return _Updated.apply(x, weight, bias, layer, parts, *(values for values, _ in updates))


class _Updated(torch.autograd.Function):
    """A layer and the parts of its updates."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer, parts, *values):
        dtype = x.dtype if x.dtype == torch.float64 else result_dtype(x, x.dtype)  # which autocast leaves alone
        ctx.layer, ctx.parts = layer, parts
        ctx.of_x, ctx.of_bias = (x.shape, x.dtype), None if bias is None else bias.dtype
        x = x.to(dtype)
        maps, kept = layer.flat(x), []
        with without_autocast(x):
            y = layer.forward(maps, weight, bias)
            for part, v in zip(parts, values):
                some = part.keep(maps)
                part.add_output(y, some, v.to(dtype))
                kept.append(x if some is maps else some)
        needs = ctx.needs_input_grad
        kept = [some if needed else None for some, needed in zip(kept, needs[5:])]
        ctx.save_for_backward(weight if needs[0] else None, *values, *kept)
        return y.view(layer.output_shape(x, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        layer, (weight, *saved) = ctx.layer, ctx.saved_tensors
        values, kept = saved[: len(ctx.parts)], saved[len(ctx.parts) :]
        needs = ctx.needs_input_grad
        grad_x = grad_bias = None
        grads = [None] * len(values)
        with without_autocast(grad):
            grad = layer.flat(grad)
            for n, (part, some, v) in enumerate(zip(ctx.parts, kept, values)):
                if needs[5 + n]:
                    grads[n] = part.of_values(grad, layer.flat(some), v).to(v.dtype)
            if needs[2]:
                wide = torch.promote_types(grad.dtype, torch.float32)
                grad_bias = grad.sum([0, *range(2, grad.dim())], dtype=wide).to(ctx.of_bias)
            if needs[0]:
                shape, dtype = ctx.of_x
                grad_x = layer.input_gradient(grad, weight, shape)
                for part, v in zip(ctx.parts, values):
                    part.add_input(grad_x, grad, v.to(grad.dtype))
                grad_x = grad_x.view(shape).to(dtype)
        return grad_x, None, grad_bias, None, None, *grads


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding_idx, structures, *values):
        y = F.embedding(ids, weight)
        for structure, v in zip(structures, values):
            embedding.add_output(y.view(-1, y.shape[-1]), ids.flatten(), v, structure, weight.shape[0])
        ctx.structures, ctx.table = structures, (weight.shape[0], -1 if padding_idx is None else padding_idx)
        ctx.save_for_backward(ids, *values)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ids, *values = ctx.saved_tensors
        grad = grad.reshape(ids.numel(), grad.shape[-1])
        grads = [
            embedding.of_values(grad, ids.flatten(), v, structure, *ctx.table).to(v.dtype) if need else None
            for structure, v, need in zip(ctx.structures, values, ctx.needs_input_grad[4:])
        ]
        return None, None, None, None, *grads
