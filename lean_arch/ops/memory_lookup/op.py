"""Lookup in a memory: a weighted sum of rows of a table, whose gradient is as large as the rows that were read.

"Memory Layers at Scale" (Berges et al. 2024, arXiv 2412.09764), section 3.2, has an embedding bag for it. Its backward
pass makes a gradient the size of the table, 4 GiB for a million rows of 1,024 numbers, most of them 0. Here entries
are sorted by the row they read, and the sum of each row is made by the forward pass's own operation; so it is compact
and the same to the bit each time. No row is copied for each of its readers, forward or backward.

Shapes: values (S, V), index, weights (T, K), rows (R,), row_values (R, V), result (T, V); N = T K entries.
"""

import importlib

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_arch.ops.backend import backend_for
from lean_arch.ops.derivatives import refuse_other_derivatives

ROOMS = {"reference": "reference", "torch": "portable", "triton": "kernels"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def memory_lookup(
    values: Tensor,
    index: Tensor,
    weights: Tensor,
    rows: Tensor | None = None,
    row_values: Tensor | None = None,
    *,
    sparse: bool = True,
) -> Tensor:
    """`(weights[..., None] * values[index]).sum(1)`, with `row_values` added to the `rows` of `values` first.

    The gradient of `values` is a sparse tensor of the rows that were read, which SGD, Adagrad and SparseAdam take; that
    of `row_values` is dense, for R rows only. The same input gives the same bits. There is no second derivative.

    Args:
        values: (S, V), float32, float16, bfloat16 or float64.
        index: (T, K) int64, from 0 to S - 1. On a GPU, where looking would wait for it, the caller sees to that.
        weights: (T, K), a float dtype, float32 beside 16-bit values too; its gradient comes in it.
        rows: (R,) int64, different from each other, in any order. A number below 0 stands for no row.
        row_values: (R, V), what is added to those rows; of the dtype of values, or float32.
        sparse: False for a dense gradient of `values`, which every optimiser takes and which is as large as the table.

    Returns:
        (T, V) in the dtype of values.

    Raises ValueError where arguments do not fit each other.
    """
    refuse_other_derivatives("memory_lookup", values, weights, row_values)
    _check(values, index, weights, rows, row_values)
    place = None if rows is None else places(index, rows)
    return torch.ops.lean_arch.memory_lookup(
        values, index, weights, place, row_values, sparse, backend_name(values.device)
    )


def places(index: Tensor, rows: Tensor) -> Tensor:
    """Where in `rows` each number of `index` is; -1 where it is not. Raises ValueError for a row that is there twice.

    Only a CPU is asked for that: a GPU would be waited for.
    """
    if len(rows) == 0:
        return torch.full_like(index, -1)
    ordered, order = rows.sort()
    if rows.is_cpu and not torch.compiler.is_compiling():
        twice = ordered[1:][(ordered.diff() == 0) & (ordered[1:] >= 0)]
        if len(twice):
            raise ValueError(f"rows hold {twice[0].item()} twice; every row may be there once")
    near = torch.searchsorted(ordered, index).clamp_(max=len(rows) - 1)
    return torch.where(ordered[near] == index, order[near], -1)


def _check(values, index, weights, rows, row_values):
    if (rows is None) != (row_values is None):
        raise ValueError("rows and row_values come together; one of them is None")
    for name, tensor, dim, shape in (
        ("values", values, 2, "(S, V)"),
        ("index", index, 2, "(T, K)"),
        ("weights", weights, 2, "(T, K)"),
        ("rows", rows, 1, "(R,)"),
        ("row_values", row_values, 2, "(R, V)"),
    ):
        if rows is None and name in ("rows", "row_values"):
            continue
        if not isinstance(tensor, Tensor) or tensor.dim() != dim:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor {shape}, got {found}")
        if tensor.device != values.device:
            raise ValueError(f"{name} is on {tensor.device}, but values are on {values.device}")
        whole = name in ("index", "rows")
        if whole and tensor.dtype != torch.int64:
            raise ValueError(f"{name} is {tensor.dtype}; int64 works")
        if not whole and tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; float32, float16, bfloat16 and float64 work")
    if weights.shape != index.shape:
        raise ValueError(f"weights are {tuple(weights.shape)}, but index is {tuple(index.shape)}; the same works")
    if rows is not None:
        if row_values.shape != (len(rows), values.shape[1]):
            shape = (len(rows), values.shape[1])
            raise ValueError(f"row_values are {tuple(row_values.shape)}; for these rows and values {shape} works")
        if row_values.dtype not in (values.dtype, torch.float32):
            raise ValueError(f"row_values are {row_values.dtype}; for values of {values.dtype} that or float32 works")


@torch.compiler.assume_constant_result
def backend_name(device: torch.device) -> str:
    """Chosen when a function is compiled, not each time it runs."""
    return backend_for(device)


def room(backend: str):
    """The module that holds a backend's `bags` and `dots`."""
    return importlib.import_module(f"lean_arch.ops.memory_lookup.{ROOMS[backend]}")


def sorted_by(row: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(order, offsets): the entries of row 0, of row 1, ... to `length` - 1; of every row in their old order."""
    ordered, order = row.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(length + 1, device=row.device))


@torch.library.custom_op("lean_arch::memory_lookup", mutates_args=())
def _forward(
    values: Tensor,
    index: Tensor,
    weights: Tensor,
    place: Tensor | None,
    row_values: Tensor | None,
    sparse: bool,
    backend: str,
) -> Tensor:
    run, (tokens, reads) = room(backend), index.shape
    if values.is_cpu and index.numel():
        low, high = index.min().item(), index.max().item()
        if low < 0 or high >= len(values):
            raise ValueError(f"index goes from {low} to {high}; values have the rows 0 to {len(values) - 1}")
    offsets = torch.arange(0, index.numel() + 1, reads, device=index.device) if reads else index.new_zeros(tokens + 1)
    out = run.bags(values, index.flatten(), offsets, weights.flatten())
    if place is not None:
        hit = place >= 0
        ends = hit.sum(1).cumsum(0)
        more = run.bags(row_values, place[hit], torch.cat((ends.new_zeros(1), ends)), weights[hit])
        out = (out + more).to(out.dtype)
    return out


@_forward.register_fake
def _(values, index, weights, place, row_values, sparse, backend):
    return values.new_empty(index.shape[0], values.shape[1])


@torch.library.custom_op("lean_arch::memory_lookup_backward", mutates_args=())
def _backward(
    grad: Tensor,
    values: Tensor,
    index: Tensor,
    weights: Tensor,
    place: Tensor | None,
    row_values: Tensor | None,
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients by weights and row_values; empty tensors where `needs` says that they are not wanted."""
    run, grad = room(backend), grad.contiguous()
    by_weights = by_rows = values.new_empty(0)
    tokens = torch.arange(len(index), device=index.device)[:, None].expand_as(index).contiguous()
    if place is not None:
        hit = place >= 0
        token, slot = tokens[hit], place[hit]
    if needs[0]:
        by_weights = run.dots(grad, tokens.flatten(), values, index.flatten()).to(weights.dtype).view_as(weights)
        if place is not None:
            by_weights[hit] += run.dots(grad, token, row_values, slot).to(weights.dtype)
    if needs[1]:
        order, offsets = sorted_by(slot, len(row_values))
        by_rows = run.bags(grad.to(row_values.dtype), token[order], offsets, weights[hit][order])
    return by_weights, by_rows


@_backward.register_fake
def _(grad, values, index, weights, place, row_values, backend, needs):
    empty = values.new_empty(0)
    return (
        weights.new_empty(weights.shape) if needs[0] else empty,
        row_values.new_empty(row_values.shape) if needs[1] else empty,
    )


@torch.library.custom_op("lean_arch::memory_lookup_table_backward", mutates_args=())
def _table_backward(
    grad: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """(rows that were read, in order; the gradient of each)."""
    ordered, order = index.flatten().sort(stable=True)
    rows, counts = ordered.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends))
    token = order // max(index.shape[1], 1)
    return rows, room(backend).bags(grad.contiguous(), token, offsets, weights.flatten()[order]).to(dtype)


@_table_backward.register_fake
def _(grad, index, weights, dtype, backend):
    read = torch.library.get_ctx().new_dynamic_size()
    return index.new_empty(read), grad.new_empty(read, grad.shape[1], dtype=dtype)


def _remember(ctx, inputs, output):
    *tensors, sparse, backend = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = sparse, backend


def _differentiate(ctx, grad):
    values, index, weights, place, row_values = ctx.saved_tensors
    sparse, backend = ctx.options
    need_values, _, need_weights, _, need_rows, *_ = ctx.needs_input_grad
    by_values = by_weights = by_rows = None
    if need_values:
        rows, compact = torch.ops.lean_arch.memory_lookup_table_backward(grad, index, weights, values.dtype, backend)
        if sparse:
            by_values = torch.sparse_coo_tensor(
                rows[None], compact, values.shape, check_invariants=False, is_coalesced=True
            )
        else:
            by_values = torch.zeros_like(values).index_copy_(0, rows, compact)
    if need_weights or need_rows:
        needs = [need_weights, need_rows]
        by_weights, by_rows = torch.ops.lean_arch.memory_lookup_backward(
            grad, values, index, weights, place, row_values, backend, needs
        )
    return by_values, None, by_weights if need_weights else None, None, by_rows if need_rows else None, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx, *grads):
    raise RuntimeError("memory_lookup cannot be differentiated twice; F.embedding and a sum can")


_backward.register_autograd(_refuse)
_table_backward.register_autograd(_refuse)


@register_flop_formula(torch.ops.lean_arch.memory_lookup)
def _forward_flops(values_shape, index_shape, *others, out_shape=None) -> int:
    return 2 * index_shape[0] * index_shape[1] * values_shape[1]


@register_flop_formula(torch.ops.lean_arch.memory_lookup_backward)
def _backward_flops(grad_shape, values_shape, index_shape, *others, out_shape=None) -> int:
    return 2 * index_shape[0] * index_shape[1] * values_shape[1] * sum(others[-1])


@register_flop_formula(torch.ops.lean_arch.memory_lookup_table_backward)
def _table_backward_flops(grad_shape, index_shape, *others, out_shape=None) -> int:
    return 2 * index_shape[0] * index_shape[1] * grad_shape[1]
