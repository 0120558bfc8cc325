"""The backward pass of sparse attention as Triton kernels: dq by tiles of queries, dk and dv by tiles of keys.

With P = exp(S - lse), Z the dropout mask and Z' = Z / (1 - p): dV = (P Z')^T dO, dS = P (dO V^T Z' - delta),
dQ = scale dS K, dK = scale dS^T Q (Dao et al. 2022, arXiv 2205.14135, appendix B). Both compute P anew, and each writes
its rows once, those of all the query heads that share a key head included: nothing is added atomically.

Shapes as in kernels.py; scores are (queries, keys) for dq and (keys, queries) for dk and dv.
"""

import triton
import triton.language as tl

from lean_arch.ops.attention.kernels_forward import (
    _SELF_SCORE,
    LOG2_E,
    kept,
    load_rows,
    product,
    rows_of,
    store_rows,
    visible,
)


@triton.jit
def log_sums(lse, inside):
    """In powers of two; +inf, which makes every weight of the row 0, where the row saw nothing or does not exist."""
    values = tl.load(lse)
    return tl.where(inside & (values != float("-inf")), values * LOG2_E, float("inf"))


@triton.jit(do_not_specialize=["kept_from"])
def attention_dq(
    q, k, v, grad_out, lse, delta, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    grad_batch, grad_head, grad_row, dq_batch, dq_head, dq_row,
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
    inside = tile * TILE_Q + r < nq
    q += batch * q_batch + head * q_head
    grad_out += batch * grad_batch + head * grad_head
    queries = load_rows(q, q_row, first, local, D, BLOCK_D)
    grads = load_rows(grad_out, grad_row, first, local, D, BLOCK_D)
    level = log_sums(lse + pair.to(tl.int64) * nq + i, inside)[:, None]
    owed = tl.load(delta + pair.to(tl.int64) * nq + i)[:, None]
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
            ) * (scale * LOG2_E)  # fmt: skip
            values = load_rows(v, v_row, k_first, k_local, D, BLOCK_D)
            slopes = product(
                grads, values, grad_out, grad_row, first, local, v, v_row, k_first, k_local, D, BLOCK_D, CHUNK
            )  # fmt: skip
            if masked:
                seen = visible(
                    bits, tl.load(entries + entry * 2 + 1), r[:, None], c[None, :], (other * TILE_K + c < nk)[None, :],
                    i[:, None], j[None, :], batch, key_lengths, q_segments, k_segments, nq, nk,
                    TILE_Q, TILE_K, CAUSAL_BY_ORDER,
                )  # fmt: skip
                if SELF_LAST:
                    scores = tl.where(i[:, None] == j[None, :], _SELF_SCORE, scores)
                scores = tl.where(seen, scores, float("-inf"))
            weights = tl.exp2(scores - level)
            if seed is not None:
                slopes = tl.where(kept(seed, pair, i[:, None], j[None, :], kept_from), slopes * kept_scale, 0.0)
            slopes = weights * (slopes - owed)
            if SELF_LAST:  # that score is a constant
                slopes = tl.where(i[:, None] == j[None, :], 0.0, slopes)
            sums = tl.dot(slopes.to(keys.dtype), keys, sums, input_precision="ieee")
    store_rows(dq + batch * dq_batch + head * dq_head, dq_row, first, local, inside, sums * scale, D, BLOCK_D)


@triton.jit(do_not_specialize=["kept_from"])
def attention_dkdv(
    q, k, v, grad_out, lse, delta, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    grad_batch, grad_head, grad_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
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
    first, local, j = rows_of(tile, pair, nk, order, TILE_K)
    r, c = tl.arange(0, TILE_Q), tl.arange(0, TILE_K)
    inside = tile * TILE_K + c < nk
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    keys = load_rows(k, k_row, first, local, D, BLOCK_D)
    values = load_rows(v, v_row, first, local, D, BLOCK_D)
    key_sums = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    value_sums = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    for member in range(GROUP):
        q_pair = pair * GROUP + member
        q_base = q + batch * q_batch + (head * GROUP + member) * q_head
        grad_base = grad_out + batch * grad_batch + (head * GROUP + member) * grad_head
        lse_base, delta_base = lse + q_pair.to(tl.int64) * nq, delta + q_pair.to(tl.int64) * nq
        for masked in tl.static_range(1 if MASK_ALL else 0, 2):
            for entry in range(split if masked else start, end if masked else split):
                other = tl.load(entries + entry * 2)
                q_first, q_local = other.to(tl.int64) * TILE_Q, r
                i = other * TILE_Q + r
                if masked:
                    q_first, q_local, i = rows_of(other, q_pair, nq, order, TILE_Q)
                queries = load_rows(q_base, q_row, q_first, q_local, D, BLOCK_D)
                level = log_sums(lse_base + i, other * TILE_Q + r < nq)[None, :]
                scores = product(
                    keys, queries, k, k_row, first, local, q_base, q_row, q_first, q_local, D, BLOCK_D, CHUNK
                ) * (scale * LOG2_E)  # fmt: skip
                if masked:
                    seen = visible(
                        bits, tl.load(entries + entry * 2 + 1), r[None, :], c[:, None], inside[:, None],
                        i[None, :], j[:, None], batch, key_lengths, q_segments, k_segments, nq, nk,
                        TILE_Q, TILE_K, CAUSAL_BY_ORDER,
                    )  # fmt: skip
                    if SELF_LAST:
                        scores = tl.where(i[None, :] == j[:, None], _SELF_SCORE, scores)
                    scores = tl.where(seen, scores, float("-inf"))
                weights = tl.exp2(scores - level)
                grads = load_rows(grad_base, grad_row, q_first, q_local, D, BLOCK_D)
                slopes = product(
                    values, grads, v, v_row, first, local, grad_base, grad_row, q_first, q_local, D, BLOCK_D, CHUNK
                )  # fmt: skip
                if seed is not None:
                    keep = kept(seed, q_pair, i[None, :], j[:, None], kept_from)
                    slopes = tl.where(keep, slopes * kept_scale, 0.0)
                    spread = tl.where(keep, weights * kept_scale, 0.0)
                else:
                    spread = weights
                value_sums = tl.dot(spread.to(grads.dtype), grads, value_sums, input_precision="ieee")
                slopes = weights * (slopes - tl.load(delta_base + i)[None, :])
                if SELF_LAST:
                    slopes = tl.where(i[None, :] == j[:, None], 0.0, slopes)
                key_sums = tl.dot(slopes.to(queries.dtype), queries, key_sums, input_precision="ieee")
    store_rows(dk + batch * dk_batch + head * dk_head, dk_row, first, local, inside, key_sums * scale, D, BLOCK_D)
    store_rows(dv + batch * dv_batch + head * dv_head, dv_row, first, local, inside, value_sums, D, BLOCK_D)
