"""The loss by Triton kernels: log-sum-exps in one pass that stores no logits, and slopes tile by tile for cuBLAS.

`cross_entropy_forward`: a program takes some tokens and a stripe of the vocabulary and keeps the log-sum-exp up as it
goes (Milakov & Gimelshein 2018, arXiv 1805.02867), the target's logit and, to smooth, the sum; there are a few stripes
to fill a GPU with, and their results are joined after. `cross_entropy_slopes`: a matrix product whose result leaves as
softmax - one-hot, into the tile that portable.py's loops then multiply with weight and x. Forming dx and dW inside a
kernel would need sums (tokens, D) and (vocabulary, D) in registers, or atomics whose order changes the bits.

Shapes: x (T, D), weight (V, D), bias (V,), target, lse, hit, total (T,); D goes by in steps of BLOCK_D.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_arch.ops.backend import interpreted
from lean_arch.ops.linear_cross_entropy import portable
from lean_arch.ops.targets import DTYPES, Build, Target, target_of

STRIPES = 32


class Tiling(NamedTuple):
    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


# kind of numbers -> target (or its kind) -> tiles, for both kernels; none of them spills registers
TABLE = {
    "half": {
        "large": Tiling(128, 128, 64, 8, 3),
        "small": Tiling(128, 128, 32, 8, 3),
        "hip": Tiling(128, 128, 32, 8, 2),
        "sm_100": Tiling(128, 64, 64, 4, 3),
    },
    "fp32": {
        "large": Tiling(64, 32, 32, 4, 2),
        "small": Tiling(64, 32, 32, 4, 2),
        "hip": Tiling(64, 64, 32, 4, 1),
    },
}


@triton.jit
def logits_tile(
    x, weight, bias, row, column, rows, columns, depth, x_stride, w_stride,
    DTYPE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits of the tile at `row` and `column`, float32; the last token and class stand for those beyond the end."""
    near = tl.minimum(tl.arange(0, BLOCK_R), rows - 1 - row)
    far = tl.minimum(tl.arange(0, BLOCK_C), columns - 1 - column)
    steps = tl.arange(0, BLOCK_D)
    x_at = (x + tl.cast(row, tl.int64) * x_stride) + (near[:, None] * x_stride + steps[None, :])
    w_at = (weight + tl.cast(column, tl.int64) * w_stride) + (far[:, None] * w_stride + steps[None, :])
    sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, depth, BLOCK_D):
        if WHOLE:
            a, b = tl.load(x_at + start), tl.load(w_at + start)
        else:
            inside = steps[None, :] < depth - start
            a, b = tl.load(x_at + start, mask=inside, other=0.0), tl.load(w_at + start, mask=inside, other=0.0)
        sums = tl.dot(a.to(DTYPE), tl.trans(b.to(DTYPE)), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + column + far)[None, :].to(tl.float32)
    return sums


@triton.jit
def cross_entropy_forward(
    x, weight, bias, target, lse, hit, total, rows, columns, depth, x_stride, w_stride, tiles,
    DTYPE: tl.constexpr, WHOLE: tl.constexpr, SMOOTH: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """lse, total (stripes, T) of stripes of `tiles` tiles; hit (T,) by the stripe that the target is in."""
    row_tiles = tl.cdiv(rows, BLOCK_R)
    stripe = tl.program_id(0) // row_tiles
    row = tl.program_id(0) % row_tiles * BLOCK_R
    row_at = tl.cast(row, tl.int64) + tl.arange(0, BLOCK_R)
    there = row_at < rows
    wanted = tl.load(target + row_at, mask=there, other=-1)
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_R,), tl.float32)
    hits = tl.zeros((BLOCK_R,), tl.float32)
    totals = tl.zeros((BLOCK_R,), tl.float32)
    begin = stripe * tiles * BLOCK_C
    end = tl.minimum(begin + tiles * BLOCK_C, columns)
    for column in range(begin, end, BLOCK_C):
        logits = logits_tile(
            x, weight, bias, row, column, rows, columns, depth, x_stride, w_stride,
            DTYPE, WHOLE, BLOCK_R, BLOCK_C, BLOCK_D,
        )  # fmt: skip
        classes = column + tl.arange(0, BLOCK_C)
        hits += tl.sum(tl.where(classes[None, :] == wanted[:, None], logits, 0.0), 1)
        if SMOOTH:
            totals += tl.sum(tl.where(classes[None, :] < columns, logits, 0.0), 1)
        logits = tl.where(classes[None, :] < columns, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        sums = sums * tl.exp(top - safe) + tl.sum(tl.exp(logits - safe[:, None]), 1)
        top = new_top
    at = tl.cast(stripe, tl.int64) * rows + row_at
    tl.store(lse + at, top + tl.log(sums), mask=there)
    tl.store(hit + row_at, hits, mask=there & (wanted >= begin) & (wanted < end))
    if SMOOTH:
        tl.store(total + at, totals, mask=there)


@triton.jit
def cross_entropy_slopes(
    x, weight, bias, target, lse, slopes, rows, columns, depth, x_stride, w_stride, kept, floor,
    DTYPE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """slopes (rows, columns), contiguous: softmax - kept * one-hot - floor."""
    row_tiles = tl.cdiv(rows, BLOCK_R)
    column = tl.program_id(0) // row_tiles * BLOCK_C
    row = tl.program_id(0) % row_tiles * BLOCK_R
    logits = logits_tile(
        x, weight, bias, row, column, rows, columns, depth, x_stride, w_stride, DTYPE, WHOLE, BLOCK_R, BLOCK_C, BLOCK_D
    )  # fmt: skip
    row_at = tl.cast(row, tl.int64) + tl.arange(0, BLOCK_R)
    there = row_at < rows
    wanted = tl.load(target + row_at, mask=there, other=-1)
    classes = column + tl.arange(0, BLOCK_C)
    tile = tl.exp(logits - tl.load(lse + row_at, mask=there, other=float("inf"))[:, None]) - floor
    tile -= tl.where(classes[None, :] == wanted[:, None], kept, 0.0)
    inside = there[:, None] & (classes[None, :] < columns)
    tl.store(slopes + row_at[:, None] * columns + classes[None, :], tile.to(DTYPE), mask=inside)


def tiling(target: Target, dtype: str) -> Tiling:
    kind = "hip" if target.backend == "hip" else "large" if target.shared_limit > 128 * 1024 else "small"
    table = TABLE["fp32" if dtype == "fp32" else "half"]
    return table.get(target.name, table[kind])


def numbers(x: Tensor, dtype: torch.dtype) -> tuple[dict, Tiling]:
    """The constants of a launch."""
    name = next((name for name, known in DTYPES.items() if known == dtype), None)
    if name is None:
        raise ValueError(
            f"x is {x.dtype}; Triton's kernels take float16, bfloat16 and float32, backend 'torch' this too"
        )
    tiles = Tiling(32, 64, 32, 4, 1) if interpreted() else tiling(target_of(x.device), name)
    constants = {"DTYPE": getattr(tl, str(dtype).removeprefix("torch.")), "WHOLE": x.shape[1] % tiles.depth == 0}
    constants |= {"BLOCK_R": tiles.rows, "BLOCK_C": tiles.columns, "BLOCK_D": tiles.depth}
    return constants | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}, tiles


def device_of(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def in_reach(x: Tensor) -> Tensor:
    """`x`, or a copy of it where its last stride is not 1 or the offsets within a tile would pass 2^31."""
    return x if x.stride(1) == 1 and x.stride(0) < 2**31 // 256 else x.contiguous()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, dtype: torch.dtype, smooth: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As in reference.py; products are of numbers of `dtype`, float32 sums. total stays 0 unless `smooth`."""
    constants, tiles = numbers(x, dtype)
    x, weight, target = in_reach(x), in_reach(weight), target.contiguous()
    column_tiles = triton.cdiv(len(weight), tiles.columns)
    each = triton.cdiv(column_tiles, STRIPES)
    stripes = triton.cdiv(column_tiles, each)
    hit = x.new_full((len(x),), torch.nan, dtype=torch.float32)
    lse = x.new_empty(stripes, len(x), dtype=torch.float32)
    total = x.new_zeros(stripes if smooth else 1, len(x), dtype=torch.float32)
    grid = (triton.cdiv(len(x), tiles.rows) * stripes,)
    if grid[0]:
        with device_of(x):
            cross_entropy_forward[grid](
                x, weight, None if bias is None else bias.contiguous(), target, lse, hit, total,
                len(x), len(weight), x.shape[1], x.stride(0), weight.stride(0), each, SMOOTH=smooth, **constants,
            )  # fmt: skip
    return lse.logsumexp(0), hit, total.sum(0)


def slopes(
    x: Tensor, w: Tensor, b: Tensor | None, lse: Tensor, target: Tensor, smoothing: float, floor: float, scratch: Tensor
) -> Tensor:
    """As in portable.py."""
    constants, tiles = numbers(x, x.dtype)
    x, w = in_reach(x), in_reach(w)
    tile = scratch[: len(x) * len(w)].view(len(x), len(w))
    grid = (triton.cdiv(len(x), tiles.rows) * triton.cdiv(len(w), tiles.columns),)
    if grid[0]:
        with device_of(x):
            cross_entropy_slopes[grid](
                x, w, None if b is None else b.contiguous(), target, lse, tile,
                len(x), len(w), x.shape[1], x.stride(0), w.stride(0), 1 - smoothing, floor, **constants,
            )  # fmt: skip
    return tile


backward = functools.partial(portable.backward, slopes=slopes)

SIGNATURE = {
    **dict.fromkeys(("x", "weight", "bias", "slopes"), "*DTYPE:16"),
    **dict.fromkeys(("lse", "hit", "total"), "*fp32:16"),
    "target": "*i64:16",
    **dict.fromkeys(("depth", "x_stride", "w_stride"), "i32:16"),
    **dict.fromkeys(("rows", "columns", "tiles"), "i32"),
    **dict.fromkeys(("kept", "floor"), "fp32"),
}


def builds(target: Target) -> Iterator[Build]:
    """Each kernel plain, and with all its choices together ("ragged": a bias, smoothing, D no multiple of a step)."""
    for kernel, dtype, ragged in itertools.product(
        (cross_entropy_forward, cross_entropy_slopes), DTYPES, (False, True)
    ):
        tiles = tiling(target, dtype)
        constexprs = {"DTYPE": getattr(tl, str(DTYPES[dtype]).removeprefix("torch.")), "WHOLE": not ragged}
        constexprs |= {"BLOCK_R": tiles.rows, "BLOCK_C": tiles.columns, "BLOCK_D": tiles.depth}
        constexprs |= {"SMOOTH": ragged} if kernel is cross_entropy_forward else {}
        constexprs |= {} if ragged else {"bias": None}
        signature = {name: SIGNATURE.get(name, "constexpr").replace("DTYPE", dtype) for name in kernel.arg_names}
        name = f"{kernel.__name__}{'_ragged' * ragged}"
        yield Build(name, dtype, kernel, signature, constexprs, tiles.num_warps, tiles.num_stages, uses_dot=True)
