"""Products with a sparse matrix by Triton kernels, with float32 sums (float64 for float64).

`sparse_product`: a program takes one row of the matrix and some places, and goes over the row's entries a few at a
time; all of them read neighbouring places. `sparse_sampled_product`: a program takes a few entries and goes over all
places. A result is written by one program alone, in one order: there are no atomics, so the same input gives the same
bits. Matrix units are of no use at a few entries a row. Columns and Rows need no kernels: they are dense products of a
library's with a few columns gathered before or scattered after.

Shapes: x (C, P), grad (O, P), values (k,), entries of a matrix (O, C); P places.
"""

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_arch.ops.sparse_linear.plans import Matrix
from lean_arch.ops.targets import DTYPES, Build, Target

NUM_WARPS = 4
PRODUCT = {"BLOCK_E": 8, "BLOCK_P": 128}  # entries and places that a program takes at a time
SAMPLED = {"BLOCK_E": 4, "BLOCK_P": 256}


@triton.jit
def sparse_product(
    x, values, columns, offsets, out, places, WIDE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr
):
    """out (O, P): of every row the sum of values[e] * x[columns[e]] over its entries."""
    tiles = tl.cdiv(places, BLOCK_P)
    row = tl.program_id(0) // tiles
    place = tl.program_id(0) % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = place < places
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    sums = tl.zeros((BLOCK_E, BLOCK_P), WIDE)
    for start in range(begin, end, BLOCK_E):
        entry = start + tl.arange(0, BLOCK_E)
        there = entry < end
        column = tl.cast(tl.load(columns + entry, mask=there, other=0), tl.int64)
        value = tl.load(values + entry, mask=there, other=0.0).to(WIDE)
        at = x + column[:, None] * places + place[None, :]
        numbers = tl.load(at, mask=there[:, None] & inside[None, :], other=0.0)
        sums += value[:, None] * numbers.to(WIDE)
    tl.store(out + tl.cast(row, tl.int64) * places + place, tl.sum(sums, 0), mask=inside)


@triton.jit
def sparse_sampled_product(
    grad, x, rows, columns, out, entries, places, WIDE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr
):
    """out (k,): grad[rows[e]] times x[columns[e]] for every entry."""
    entry = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    there = entry < entries
    g_at = grad + tl.cast(tl.load(rows + entry, mask=there, other=0), tl.int64)[:, None] * places
    x_at = x + tl.cast(tl.load(columns + entry, mask=there, other=0), tl.int64)[:, None] * places
    sums = tl.zeros((BLOCK_E, BLOCK_P), WIDE)
    for start in range(0, places, BLOCK_P):
        place = start + tl.arange(0, BLOCK_P)[None, :]
        inside = there[:, None] & (place < places)
        g = tl.load(g_at + place, mask=inside, other=0.0).to(WIDE)
        sums += g * tl.load(x_at + place, mask=inside, other=0.0).to(WIDE)
    tl.store(out + entry, tl.sum(sums, 1), mask=there)


def product(entries: Matrix, values: Tensor, x: Tensor) -> Tensor:
    """As in portable.py, in float32 or float64."""
    outputs, places = len(entries.offsets) - 1, x.shape[1]
    out = x.new_empty(outputs, places, dtype=torch.promote_types(x.dtype, torch.float32))
    grid = outputs * triton.cdiv(places, PRODUCT["BLOCK_P"])
    if grid:
        with device_of(x):
            sparse_product[(grid,)](
                x, values, entries.columns, entries.offsets, out, places,
                WIDE=wide(x), num_warps=NUM_WARPS, **PRODUCT,
            )  # fmt: skip
    return out


def sampled_product(entries: Matrix, rows: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """As in portable.py, in float32 or float64."""
    number, places = len(rows), x.shape[1]
    out = x.new_empty(number, dtype=torch.promote_types(x.dtype, torch.float32))
    if number:
        with device_of(x):
            sparse_sampled_product[(triton.cdiv(number, SAMPLED["BLOCK_E"]),)](
                grad, x, rows, entries.columns, out, number, places,
                WIDE=wide(x), num_warps=NUM_WARPS, **SAMPLED,
            )  # fmt: skip
    return out


def wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def device_of(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def builds(target: Target) -> Iterator[Build]:
    """Each kernel with a number of places that is a multiple of 16, and with one that is not ("ragged")."""
    for fn, tile in ((sparse_product, PRODUCT), (sparse_sampled_product, SAMPLED)):
        for dtype in DTYPES:
            for ragged in (False, True):
                signature = dict.fromkeys(("x", "values", "grad"), f"*{dtype}:16")
                signature |= dict.fromkeys(("rows", "columns", "offsets"), "*i32:16") | {"out": "*fp32:16"}
                signature |= {"entries": "i32", "places": "i32" if ragged else "i32:16"}
                signature = {name: kind for name, kind in signature.items() if name in fn.arg_names}
                name = f"{fn.__name__}{'_ragged' * ragged}"
                yield Build(name, dtype, fn, signature, {"WIDE": tl.float32, **tile}, NUM_WARPS, 1, uses_dot=False)
