"""Weighted sums of rows and their gradients by Triton kernels, with float32 sums, each in an order of its own.

`memory_bags` sums up a bag of rows, some at a time: of the table, those that a token reads; of the gradient (BACK),
those of the tokens that read a row, which were sorted before. `memory_dots` multiplies a token's gradient with the rows
that it reads. There are no atomics, so the same input gives the same bits. All readers of a row are summed up by one
program: where every token reads one, its program is the last to end.

Shapes as in reference.py; a tile (BLOCK_N, BLOCK_V), entries by numbers of a row.
"""

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_arch.ops.targets import DTYPES, Build, Target

NUM_WARPS = 4
BLOCK_N = 8
BLOCK_V = 256  # at most


@triton.jit
def memory_bags(
    table, index, weights, order, offsets, out, bags, reads, size, table_stride,
    BACK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """out (bags, size) of the rows `index` of the table, or, BACK, of the tokens that entries `order` belong to."""
    program = tl.program_id(0)
    bag = tl.cast(program % bags, tl.int64)
    column = program // bags * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = column < size
    if BACK:
        begin, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
    else:
        begin, end = bag * reads, bag * reads + reads
    sums = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(begin, end, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        there = entry < end
        if BACK:
            entry = tl.load(order + entry, mask=there, other=0)
            row = entry // reads
        else:
            row = tl.load(index + entry, mask=there, other=-1)
            there = row >= 0
        weight = tl.load(weights + entry, mask=there, other=0.0).to(tl.float32)
        at = table + row[:, None] * table_stride + column[None, :]
        numbers = tl.load(at, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        sums += tl.sum(weight[:, None] * numbers, 0)
    tl.store(out + bag * size + column, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def memory_dots(
    grad, table, index, out, tokens, reads, size, table_stride, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr
):
    """out (tokens, reads): the products of a token's gradient with the rows that it reads, 0 for none."""
    program = tl.program_id(0)
    token = tl.cast(program % tokens, tl.int64)
    read = program // tokens * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = read < reads
    row = tl.load(index + token * reads + read, mask=inside, other=-1)
    there = row >= 0
    sums = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, size, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        slope = tl.load(grad + token * size + column, mask=column < size, other=0.0).to(tl.float32)
        at = table + row[:, None] * table_stride + column[None, :]
        numbers = tl.load(at, mask=there[:, None] & (column < size)[None, :], other=0.0).to(tl.float32)
        sums += slope[None, :] * numbers
    tl.store(out + token * reads + read, tl.sum(sums, 1), mask=inside)


def tile(size: int) -> dict[str, int]:
    return {"BLOCK_N": BLOCK_N, "BLOCK_V": min(triton.next_power_of_2(max(size, 1)), BLOCK_V)}


def rows_in_reach(name: str, table: Tensor) -> Tensor:
    """`table`, or a copy of it whose rows are contiguous. Raises ValueError for a dtype that kernels do not take."""
    if table.dtype not in DTYPES.values():
        raise ValueError(
            f"{name} is {table.dtype}; Triton's kernels take float16, bfloat16 and float32, backend 'torch' this too"
        )
    return table if table.stride(1) == 1 or table.shape[1] == 1 else table.contiguous()


def device_of(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def forward(table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As in reference.py."""
    table = rows_in_reach("values", table)
    out = table.new_empty(len(index), table.shape[1])
    launch_bags(table, index.contiguous(), weights.contiguous(), None, None, out, index.shape[1])
    return out


def by_rows(grad: Tensor, weights: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """As in reference.py."""
    grad = rows_in_reach("grad", grad)
    out = grad.new_empty(len(offsets) - 1, grad.shape[1], dtype=torch.float32)
    launch_bags(grad, None, weights.contiguous(), order, offsets, out, weights.shape[1])
    return out


def launch_bags(table, index, weights, order, offsets, out, reads: int) -> None:
    bags, size = out.shape
    constants = tile(size)
    grid = bags * triton.cdiv(size, constants["BLOCK_V"])
    if grid:
        with device_of(table):
            memory_bags[(grid,)](
                table, index, weights, order, offsets, out, bags, reads, size, table.stride(0),
                BACK=index is None, num_warps=NUM_WARPS, **constants,
            )  # fmt: skip


def by_weights(grad: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """As in reference.py."""
    grad, table = rows_in_reach("grad", grad).contiguous(), rows_in_reach("values", table)
    (tokens, reads), size = index.shape, table.shape[1]
    out = table.new_empty(tokens, reads, dtype=torch.float32)
    grid = tokens * triton.cdiv(reads, BLOCK_N)
    if grid:
        with device_of(table):
            memory_dots[(grid,)](
                grad, table, index.contiguous(), out, tokens, reads, size, table.stride(0),
                num_warps=NUM_WARPS, **tile(size),
            )  # fmt: skip
    return out


def builds(target: Target) -> Iterator[Build]:
    """Sums forward and backward, and products, of whole tiles."""
    tensors = {"table": "*{}:16", "grad": "*{}:16", "weights": "*fp32:16"}
    tensors |= dict.fromkeys(("index", "order", "offsets"), "*i64:16")
    sizes = {"size": "i32:16", "table_stride": "i32:16", "bags": "i32", "tokens": "i32", "reads": "i32"}
    for dtype in DTYPES:
        for name, kernel, constants, out in (
            ("memory_bags_forward", memory_bags, {"BACK": False, "order": None, "offsets": None}, "*{}:16"),
            ("memory_bags_rows", memory_bags, {"BACK": True, "index": None}, "*fp32:16"),
            ("memory_dots", memory_dots, {}, "*fp32:16"),
        ):
            constexprs = tile(BLOCK_V) | constants
            kinds = tensors | sizes | {"out": out}
            signature = {n: kinds[n].format(dtype) for n in kernel.arg_names if n not in constexprs}
            yield Build(name, dtype, kernel, signature, constexprs, NUM_WARPS, 1, uses_dot=False)
