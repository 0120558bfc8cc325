"""The forward pass of sparse attention as a Triton kernel, and what it shares with those of the backward pass.

A program takes one tile of queries of one head and goes through the tiles of keys that it sees, with the softmax kept
up as it goes (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135), in powers of two. Tiles
in which every pair counts come first and ask no questions; the others follow with their masks.

Shapes: q, out (B, Hq, Nq, D); k, v (B, Hkv, Nk, D); lse (B, Hq, Nq); order (B, H, N); a pair is b * H + h. D is padded
to BLOCK_D, a power of two, within the kernels. What walk, entries and bits hold: kernels.Walk.
"""

import math

import triton
import triton.language as tl

from lean_arch.ops.attention import dropout

LOG2_E = tl.constexpr(1 / math.log(2))
LN_2 = tl.constexpr(math.log(2))
SELF_SCORE = -(2.0**17)  # of a token with itself under `self_last`, in powers of two: exact in float32, unlike -1e5
_SELF_SCORE = tl.constexpr(SELF_SCORE)
_FIRST, _SECOND, _GOLDEN = (tl.constexpr(c) for c in (dropout.FIRST, dropout.SECOND, dropout.GOLDEN))


@triton.jit
def mix(x):
    x = x ^ (x >> 16)
    x = x * _FIRST
    x = x ^ (x >> 15)
    x = x * _SECOND
    return x ^ (x >> 16)


@triton.jit
def kept(seed, pair, i, j, kept_from):
    """dropout.keep, for a head's number `pair` and positions i and j that broadcast."""
    drawn = tl.load(seed)
    key = mix(mix((drawn >> 32).to(tl.uint32)) ^ drawn.to(tl.uint32))
    key = mix(mix(key ^ pair.to(tl.uint32)) ^ i.to(tl.uint32))
    return mix(key ^ (j.to(tl.uint32) * _GOLDEN)) >= kept_from.to(tl.uint32)


@triton.jit
def rows_of(tile, pair, n, order, TILE: tl.constexpr):
    """Of a tile: the row that addresses count from, each row from there, and its position. The last stands for those
    beyond the end, which whoever uses them leaves out."""
    first = tile.to(tl.int64) * TILE
    local = tl.minimum(tl.arange(0, TILE), n - 1 - tile * TILE)
    if order is not None:
        local = tl.load(order + pair.to(tl.int64) * n + first + local).to(tl.int64)
        first = first * 0
    return first, local, (first + local).to(tl.int32)


@triton.jit
def load_rows(base, stride, first, local, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)[None, :]
    at = (base + first * stride) + (local[:, None] * stride + columns)
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=columns < D, other=0.0)


@triton.jit
def product(
    whole_x, whole_y, x, x_row, x_first, x_local, y, y_row, y_first, y_local,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """x y^T of two tiles, which lie at x and y. Exact float32 has only scalar units on NVIDIA, for which Triton keeps
    whole rows in each thread's registers: there it goes CHUNK columns at a time."""
    if CHUNK >= BLOCK_D:
        sums = tl.dot(whole_x, tl.trans(whole_y), input_precision="ieee")
    else:
        sums = tl.zeros([x_local.shape[0], y_local.shape[0]], tl.float32)
        for start in range(0, BLOCK_D, CHUNK):
            columns = start + tl.arange(0, CHUNK)[None, :]
            some_x = tl.load(x + x_first * x_row + (x_local[:, None] * x_row + columns), mask=columns < D, other=0.0)
            some_y = tl.load(y + y_first * y_row + (y_local[:, None] * y_row + columns), mask=columns < D, other=0.0)
            sums = tl.dot(some_x, tl.trans(some_y), sums, input_precision="ieee")
    return sums


@triton.jit
def store_rows(base, stride, first, local, inside, values, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)[None, :]
    at = (base + first * stride) + (local[:, None] * stride + columns)
    tl.store(at, values.to(base.dtype.element_ty), mask=inside[:, None] & (columns < D))


@triton.jit
def visible(
    bits, mask, r, c, inside, i, j, batch, key_lengths, q_segments, k_segments, nq, nk,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CAUSAL_BY_ORDER: tl.constexpr,
):  # fmt: skip
    """Which pairs of a tile count: rows r and columns c of it, at positions i and j; those are (n, 1), these (1, n), or
    the other way round."""
    words: tl.constexpr = TILE_K // 32
    at = bits + tl.maximum(mask - 1, 0).to(tl.int64) * (TILE_Q * words) + r * words
    partial = (mask > 0) & (r >= 0)
    word = tl.load(at, mask=partial, other=-1)
    for w in tl.static_range(1, words):
        word = tl.where(c >= 32 * w, tl.load(at + w, mask=partial, other=-1), word)
    seen = (((word >> (c % 32)) & 1) != 0) & inside
    if key_lengths is not None:
        seen = seen & (j < tl.load(key_lengths + batch))
    if q_segments is not None:
        seen = seen & (tl.load(q_segments + batch * nq + i) == tl.load(k_segments + batch * nk + j))
    if CAUSAL_BY_ORDER:
        seen = seen & (j <= i)
    return seen


@triton.jit(do_not_specialize=["kept_from"])
def attention_forward(
    q, k, v, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    walk, entries, bits, key_lengths, q_segments, k_segments, order, seed,
    scale, kept_from, kept_scale, pairs, heads, nq, nk,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, MASK_ALL: tl.constexpr,
    CAUSAL_BY_ORDER: tl.constexpr, SELF_LAST: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) % pairs
    walk += tl.program_id(0) // pairs * 4
    tile, start, split, end = tl.load(walk), tl.load(walk + 1), tl.load(walk + 2), tl.load(walk + 3)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    first, local, i = rows_of(tile, pair, nq, order, TILE_Q)
    r, c = tl.arange(0, TILE_Q), tl.arange(0, TILE_K)
    q += batch * q_batch + head * q_head
    queries = load_rows(q, q_row, first, local, D, BLOCK_D)
    strength = scale * LOG2_E
    top = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    sums = tl.zeros([TILE_Q, BLOCK_D], tl.float32)
    for masked in tl.static_range(1 if MASK_ALL else 0, 2):
        for entry in range(split if masked else start, end if masked else split):
            other = tl.load(entries + entry * 2)
            k_first, k_local = other.to(tl.int64) * TILE_K, c
            j = other * TILE_K + c
            if masked:
                k_first, k_local, j = rows_of(other, pair, nk, order, TILE_K)
            keys = load_rows(k, k_row, k_first, k_local, D, BLOCK_D)
            scores = product(
                queries, keys, q, q_row, first, local, k, k_row, k_first, k_local, D, BLOCK_D, CHUNK
            )  # fmt: skip
            if masked:
                seen = visible(
                    bits, tl.load(entries + entry * 2 + 1), r[:, None], c[None, :], (other * TILE_K + c < nk)[None, :],
                    i[:, None], j[None, :], batch, key_lengths, q_segments, k_segments, nq, nk,
                    TILE_Q, TILE_K, CAUSAL_BY_ORDER,
                )  # fmt: skip
                scores *= strength
                if SELF_LAST:
                    scores = tl.where(i[:, None] == j[None, :], _SELF_SCORE, scores)
                scores = tl.where(seen, scores, float("-inf"))
                new_top = tl.maximum(top, tl.max(scores, 1))
                level = tl.where(new_top == float("-inf"), 0.0, new_top)
                weights = tl.exp2(scores - level[:, None])
            else:
                new_top = tl.maximum(top, tl.max(scores, 1) * strength)  # the scale is not negative
                level = new_top
                weights = tl.exp2(scores * strength - level[:, None])
            shrink = tl.exp2(top - level)
            total = total * shrink + tl.sum(weights, 1)
            if seed is not None:
                weights = tl.where(kept(seed, pair, i[:, None], j[None, :], kept_from), weights, 0.0)
            values = load_rows(v, v_row, k_first, k_local, D, BLOCK_D)
            sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
            top = new_top
    inside = tile * TILE_Q + r < nq
    total = tl.where(total > 0, total, 1.0)  # a row that saw nothing has sums of 0 and a top of -inf
    sums *= (kept_scale / total)[:, None]
    store_rows(out + batch * out_batch + head * out_head, out_row, first, local, inside, sums, D, BLOCK_D)
    tl.store(lse + pair.to(tl.int64) * nq + i, (top + tl.log2(total)) * LN_2, mask=inside)
