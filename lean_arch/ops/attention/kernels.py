"""Sparse attention by Triton kernels (kernels_forward.py, kernels_backward.py): how they are called and built.

They know nothing of patterns: they go through lists of tiles (see tiles.py), and take their masks as bits. For LSH
attention, `order` (B, H, N) int32 says which position the r-th row of a sorted sequence comes from: tiles are of the
sorted sequence, all else is read and written where it lies. Grids have one side only: the others end at 65,535.

Shapes: q, out (B, Hq, Nq, D); k, v (B, Hkv, Nk, D); lse, delta (B, Hq, Nq) float32.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from lean_arch.ops.attention import dropout
from lean_arch.ops.attention.kernels_backward import attention_dkdv, attention_dq
from lean_arch.ops.attention.kernels_forward import attention_forward
from lean_arch.ops.attention.problem import Problem
from lean_arch.ops.attention.tiles import compile_tiles
from lean_arch.ops.attention.tilings import HEAD_SIZES, Tiling, tiling
from lean_arch.ops.backend import interpreted
from lean_arch.ops.patterns import Pattern
from lean_arch.ops.targets import DTYPES, Build, Target, target_of

REGISTERS = 255  # all that a thread can have: left alone, ptxas sometimes stops at 128 and spills


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """What a kernel goes through. rows (T, 4) int32: tile, and its entries: from [1] on the whole ones, from [2] on
    those to mask, up to [3]; the longest come first, for the GPU to end together. entries (E, 2) int32: the other
    side's tile, and 0 or 1 + its row in bits (as in Tiles)."""

    rows: Tensor
    entries: Tensor
    bits: Tensor


@functools.lru_cache(256)
def walk(
    pattern: Pattern, nq: int, nk: int, tile_q: int, tile_k: int, device: torch.device, side: str, mask_all: bool
) -> Walk:
    """For side "queries" the tiles of keys that each tile of queries sees, for "keys" the other way round."""
    tiles = compile_tiles(pattern, nq, nk, tile_q, tile_k)
    with torch.inference_mode(False), torch.device("cpu"):
        lists, (length, tile) = (tiles.queries, (nk, tile_k)) if side == "queries" else (tiles.keys, (nq, tile_q))
        starts = lists.starts.long()
        cut = (lists.others + 1) * tile > length  # a tile beyond the end needs its mask even where all of it counts
        masked = (lists.masks > 0) | cut | mask_all
        owner = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
        entries = torch.stack([lists.others, lists.masks], 1)[(owner * 2 + masked).argsort(stable=True)]
        splits = starts[1:] - torch.bincount(owner[masked], minlength=len(starts) - 1)
        rows = torch.stack([torch.arange(len(starts) - 1), starts[:-1], splits, starts[1:]], 1)
        rows = rows[starts.diff().argsort(descending=True, stable=True)]
        return Walk(*(t.to(torch.int32).contiguous().to(device) for t in (rows, entries, tiles.bits)))


def rows_in_reach(x: Tensor) -> Tensor:
    """`x`, or a copy of it where its last stride is not 1 or a tile's offsets would pass 2^31."""
    return x if x.stride(3) == 1 and x.stride(2) < 2**31 // 256 else x.contiguous()


def settled(result: Tensor, written: Tensor) -> Tensor:
    """`result`, with what the kernel wrote in its stead."""
    return result if written is result else result.copy_(written)


def padded(head_size: int) -> int:
    return max(16, triton.next_power_of_2(head_size))


def chunk(dtype: torch.dtype, scalar: bool) -> int:
    """Columns that are multiplied at a time (see kernels_forward.product): all, but of float32 on scalar units."""
    return 32 if dtype == torch.float32 and scalar else 256


def tiling_for(kernel: str, q: Tensor) -> Tiling:
    if interpreted():
        return Tiling(32, 32, 4, 1)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == q.dtype)
    return tiling(kernel, target_of(q.device), dtype, padded(q.shape[3]))


def strides(*tensors: Tensor) -> Iterator[int]:
    for tensor in tensors:
        yield from tensor.stride()[:3]


def launch(kernel, side: str, tensors: list[Tensor], keys: Tensor, problem: Problem, order, causal_by_order, self_last):
    """Runs `kernel` over the tiles of `side`; `tensors` are its first arguments, q the first of them."""
    q = tensors[0]
    if q.dtype not in DTYPES.values():
        raise ValueError(
            f"q is {q.dtype}; Triton's kernels take float16, bfloat16 and float32, backend 'torch' this too"
        )
    if order is not None and (order.shape != q.shape[:3] or order.shape != keys.shape[:3]):
        raise ValueError(
            f"order is {tuple(order.shape)}; q {tuple(q.shape)} and k {tuple(keys.shape)} must agree with it"
        )
    batch, heads, nq, size = q.shape
    groups, nk = heads // keys.shape[1], keys.shape[2]
    tiling = tiling_for(kernel.__name__, q)
    rules = [problem.key_lengths, problem.q_segments, problem.k_segments, order]
    rules = [None if rule is None else rule.to(torch.int32).contiguous() for rule in rules]
    mask_all = any(rule is not None for rule in rules)
    way = walk(problem.pattern, nq, nk, tiling.tile_q, tiling.tile_k, q.device, side, mask_all)
    own_heads = heads if side == "queries" else keys.shape[1]
    seed = problem.seed if problem.dropout_p > 0 else None
    grid = (len(way.rows) * batch * own_heads,)
    if grid[0] == 0:
        return
    limits = {"maxnreg": REGISTERS} if q.is_cuda and torch.version.hip is None else {}
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        kernel[grid](
            *tensors, *strides(*(t for t in tensors if t.dim() == 4)), way.rows, way.entries, way.bits, *rules, seed,
            problem.scale, dropout.threshold(problem.dropout_p), 1 / (1 - problem.dropout_p),
            batch * own_heads, own_heads, nq, nk,
            GROUP=groups, D=size, BLOCK_D=padded(size), TILE_Q=tiling.tile_q, TILE_K=tiling.tile_k,
            CHUNK=chunk(q.dtype, torch.version.hip is None),
            MASK_ALL=mask_all, CAUSAL_BY_ORDER=causal_by_order, SELF_LAST=self_last,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages, **limits,
        )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    order: Tensor | None = None,
    causal_by_order: bool = False,
    self_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out as q, lse (B, Hq, Nq) float32), as reference.py computes them.

    With `order` (B, H, N) int32, a permutation of the positions for each head, the pattern is one of the sorted
    sequences. `causal_by_order`: a query sees no key at a later position. `self_last`: a token counts for itself only
    where it sees no other.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if problem.scale < 0:  # the kernel takes the largest product for that of the largest score
        q, problem = -q, dataclasses.replace(problem, scale=-problem.scale)
    q, k, v, written = (rows_in_reach(t) for t in (q, k, v, out))
    launch(attention_forward, "queries", [q, k, v, written, lse], k, problem, order, causal_by_order, self_last)
    return settled(out, written), lse


def backward(
    grad_out: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    problem: Problem,
    *,
    order: Tensor | None = None,
    causal_by_order: bool = False,
    self_last: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) as q, k and v, from delta (B, Hq, Nq) float32 as op.py makes it; options as in kernels.forward."""
    results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    q, k, v, grad_out, dq, dk, dv = (rows_in_reach(t) for t in (q, k, v, grad_out, *results))
    tensors = [q, k, v, grad_out, lse.contiguous(), delta.contiguous()]
    options = (problem, order, causal_by_order, self_last)
    launch(attention_dq, "queries", [*tensors, dq], k, *options)
    launch(attention_dkdv, "keys", [*tensors, dk, dv], k, *options)
    return tuple(map(settled, results, (dq, dk, dv)))


SIGNATURE = {  # of all arguments that are not strides; numbers are those of the plainest call
    **dict.fromkeys(("q", "k", "v", "out", "grad_out", "dq", "dk", "dv"), "*DTYPE:16"),
    **dict.fromkeys(("lse", "delta"), "*fp32:16"),
    **dict.fromkeys(("walk", "entries", "bits", "key_lengths", "q_segments", "k_segments", "order"), "*i32:16"),
    "seed": "*i64:16",
    **dict.fromkeys(("scale", "kept_scale"), "fp32"),
    "kept_from": "i64",
    **dict.fromkeys(("pairs", "heads", "nq", "nk"), "i32"),
}
RULES = ("key_lengths", "q_segments", "k_segments", "order", "seed")  # None where a call has none


def builds(target: Target) -> Iterator[Build]:
    """Each kernel for head sizes 64 and 128; but for float16, which is like bfloat16, for 256 and with all its rules
    together ("masked") too."""
    for kernel, dtype, size, masked in itertools.product(
        (attention_forward, attention_dq, attention_dkdv), DTYPES, HEAD_SIZES, (False, True)
    ):
        if (masked and size == 256) or (dtype == "fp16" and (masked or size == 256)):
            continue
        tiles = tiling(kernel.__name__, target, dtype, size)
        constexprs = {"GROUP": 1, "D": size, "BLOCK_D": size, "TILE_Q": tiles.tile_q, "TILE_K": tiles.tile_k}
        constexprs["CHUNK"] = chunk(DTYPES[dtype], target.backend == "cuda")
        constexprs |= dict.fromkeys(("MASK_ALL", "CAUSAL_BY_ORDER", "SELF_LAST"), masked)
        constexprs |= {} if masked else dict.fromkeys(RULES)
        signature = {name: SIGNATURE.get(name, "i32:16").replace("DTYPE", dtype) for name in kernel.arg_names}
        name = f"{kernel.__name__}{'_masked' * masked}_d{size}"
        registers = REGISTERS if target.backend == "cuda" else None
        yield Build(name, dtype, kernel, signature, constexprs, tiles.num_warps, tiles.num_stages, True, registers)
