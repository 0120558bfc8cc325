"""Lookup in a memory: a weighted sum of rows of a table, whose gradient is as large as the rows that were read.

"Memory Layers at Scale" (Berges et al. 2024, arXiv 2412.09764), section 3.2, has an embedding bag for it. Its backward
pass makes a gradient the size of the table, 4 GiB for a million rows of 1,024 numbers, most of them 0. Here entries
are sorted by the row they read, and the sum of each row is made by the forward pass's own operation; so it is compact
and the same to the bit each time. No row is copied for each of its readers, forward or backward.

Shapes: values (S, V), index, weights (T, K), rows (R,), row_values (R, V), result (T, V). A table is either of values
and row_values.
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
        index: (T, K) int64, below S; a negative number reads nothing. A GPU does not look for numbers that are too
            large, for one would wait for it.
        weights: (T, K), a float dtype, float32 beside 16-bit values too; its gradient comes in it.
        rows: (R,) int64, different from each other, in any order; a negative number stands for no row.
        row_values: (R, V), what is added to those rows; of the dtype of values, or float32.
        sparse: False for a dense gradient of `values`, which every optimiser takes and which is as large as the table.

    Returns:
        (T, V) in the dtype of values.

    Raises ValueError where arguments do not fit each other.
    """
    refuse_other_derivatives("memory_lookup", values, weights, row_values)
    _check(values, index, weights, rows, row_values)
    backend = _backend(values.device)
    out = torch.ops.lean_arch.memory_lookup(values, index, weights, sparse, backend)
    if rows is None:
        return out
    more = torch.ops.lean_arch.memory_lookup(row_values, places(index, rows), weights, False, backend)
    return out + more.to(out.dtype)


@torch.library.custom_op("lean_arch::memory_places", mutates_args=())
def places(index: Tensor, rows: Tensor) -> Tensor:
    """Where in `rows` each number of `index` is; -1 where it is not. Raises ValueError for a row that is there twice.

    Only a CPU looks for that: a GPU would be waited for.
    """
    if len(rows) == 0:
        return torch.full_like(index, -1)
    ordered, order = rows.sort()
    if rows.is_cpu:
        twice = ordered[1:][(ordered.diff() == 0) & (ordered[1:] >= 0)]
        if len(twice):
            raise ValueError(f"rows hold {twice[0].item()} twice; every row may be there once")
    near = torch.searchsorted(ordered, index).clamp_(max=len(rows) - 1)
    return torch.where((ordered[near] == index) & (index >= 0), order[near], -1)


@places.register_fake
def _(index, rows):
    return torch.empty_like(index)


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
def _backend(device: torch.device) -> str:
    """Chosen when a function is compiled, not each time it runs."""
    return backend_for(device)


def room(backend: str):
    """The module that holds a backend's `forward`, `by_weights` and `by_rows`."""
    return importlib.import_module(f"lean_arch.ops.memory_lookup.{ROOMS[backend]}")


@torch.library.custom_op("lean_arch::memory_lookup", mutates_args=())
def _forward(table: Tensor, index: Tensor, weights: Tensor, sparse: bool, backend: str) -> Tensor:
    if table.is_cpu and index.numel() and index.max() >= len(table):
        raise ValueError(f"index goes up to {index.max().item()}; values have the rows 0 to {len(table) - 1}")
    return room(backend).forward(table, index, weights)


@_forward.register_fake
def _(table, index, weights, sparse, backend):
    return table.new_empty(index.shape[0], table.shape[1])


@torch.library.custom_op("lean_arch::memory_lookup_by_weights", mutates_args=())
def _by_weights(grad: Tensor, table: Tensor, index: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return room(backend).by_weights(grad.contiguous(), table, index).to(dtype)


@_by_weights.register_fake
def _(grad, table, index, dtype, backend):
    return grad.new_empty(index.shape, dtype=dtype)


@torch.library.custom_op("lean_arch::memory_lookup_by_table", mutates_args=())
def _by_table(grad: Tensor, table: Tensor, index: Tensor, weights: Tensor, backend: str) -> Tensor:
    """The gradient of every row of the table."""
    ordered, order = index.flatten().sort(stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(len(table) + 1, device=index.device))
    return room(backend).by_rows(grad.contiguous(), weights, order, offsets).to(table.dtype)


@_by_table.register_fake
def _(grad, table, index, weights, backend):
    return table.new_empty(table.shape)


@torch.library.custom_op("lean_arch::memory_lookup_by_rows", mutates_args=())
def _by_rows(grad: Tensor, table: Tensor, index: Tensor, weights: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """(the rows that were read, ascending; the gradient of each)."""
    ordered, order = index.flatten().sort(stable=True)
    none = (ordered < 0).sum()
    rows, counts = ordered[none:].unique_consecutive(return_counts=True)
    offsets = torch.cat((none[None], none + counts.cumsum(0)))
    return rows, room(backend).by_rows(grad.contiguous(), weights, order, offsets).to(table.dtype)


@_by_rows.register_fake
def _(grad, table, index, weights, backend):
    read = torch.library.get_ctx().new_dynamic_size()
    return index.new_empty(read), table.new_empty(read, table.shape[1])


def _remember(ctx, inputs, output):
    *tensors, ctx.sparse, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    table, index, weights = ctx.saved_tensors
    by_table = by_weights = None
    if ctx.needs_input_grad[0] and ctx.sparse:
        rows, values = torch.ops.lean_arch.memory_lookup_by_rows(grad, table, index, weights, ctx.backend)
        by_table = torch.sparse_coo_tensor(rows[None], values, table.shape, check_invariants=False, is_coalesced=True)
    elif ctx.needs_input_grad[0]:
        by_table = torch.ops.lean_arch.memory_lookup_by_table(grad, table, index, weights, ctx.backend)
    if ctx.needs_input_grad[2]:
        by_weights = torch.ops.lean_arch.memory_lookup_by_weights(grad, table, index, weights.dtype, ctx.backend)
    return by_table, None, by_weights, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx, *grads):
    raise RuntimeError("memory_lookup cannot be differentiated twice; F.embedding and a sum can")


for _gradient in (_by_weights, _by_table, _by_rows):
    _gradient.register_autograd(_refuse)


@register_flop_formula(torch.ops.lean_arch.memory_lookup)
def _forward_flops(table_shape, index_shape, *others, out_shape=None) -> int:
    """A product and a sum for each number of each row that is read."""
    return 2 * index_shape[0] * index_shape[1] * table_shape[1]


@register_flop_formula(
    [getattr(torch.ops.lean_arch, f"memory_lookup_by_{name}") for name in ("weights", "table", "rows")]
)
def _backward_flops(grad_shape, table_shape, index_shape, *others, out_shape=None) -> int:
    return _forward_flops(table_shape, index_shape)
