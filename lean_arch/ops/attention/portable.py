"""Sparse attention by PyTorch's own operators, in time and memory linear in the length: trains anywhere, CPUs first.

It walks the pattern's tiles, some heads and one tile of queries at a time. The keys a tile sees are a few runs of
consecutive ones: slices of k and v, so nothing of their size is copied. Where a tile sees very many keys (global
tokens, dense patterns) they are cut into pieces, whose results are merged by running maxima and sums (Milakov and
Gimelshein 2018, arXiv 1805.02867). The backward pass adds each tile's share to slices of dk and dv, in one order.

On a CPU, float32 without lengths, segments or dropout goes through PyTorch's fused kernel (FlashAttention, Dao et al.
2022, arXiv 2205.14135), a piece at a time; all else through matrix products. Their log-sum-exps mix freely.

Shapes: q (B, Hq, Nq, D); k, v (B, Hkv, Nk, D). Of a block: b sequences, h key heads and their g = Hq / Hkv query heads
each, n queries, c keys of a piece; rows (b, h, g * n, D), scores (b * h, g * n, c).
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lean_arch.ops.attention.dropout import keep, row_keys
from lean_arch.ops.attention.pieces import TILE_Q, Piece, Plan, plan_of
from lean_arch.ops.attention.problem import Problem, arithmetic
from lean_arch.ops.patterns import Pattern

BLOCK = {"cpu": 2**19}  # scores at a time: about what stays in a cache; elsewhere 2^26
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def at_once(q: Tensor, k: Tensor, plan: Plan) -> tuple[int, int]:
    """(sequences, key heads) of a block."""
    batch, heads = k.shape[:2]
    scores = q.shape[1] // heads * min(TILE_Q, q.shape[2]) * plan.width  # of one key head
    room = BLOCK.get(q.device.type, 2**26) // max(scores, 1)
    return min(max(room // heads, 1), max(batch, 1)), min(max(room, 1), heads)


@dataclasses.dataclass(frozen=True)
class Block:
    """Sequences, key heads and queries that are computed together, and the pieces of keys that these queries see."""

    sequences: slice
    heads: slice
    rows: slice
    pieces: tuple[Piece, ...]

    def of_queries(self, x: Tensor) -> Tensor:
        """View (b, h, g, n, ...) of `x` (B, Hkv, g, Nq, ...)."""
        return x[self.sequences, self.heads, :, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        """View (b, h, Nk, ...) of `x` (B, Hkv, Nk, ...)."""
        return x[self.sequences, self.heads]


class Walk:
    """All blocks of a problem, and what they have in common."""

    def __init__(self, q: Tensor, k: Tensor, problem: Problem):
        self.batch, self.heads, self.nk, self.size = k.shape
        self.groups, self.nq = q.shape[1] // self.heads, q.shape[2]
        self.problem, self.device, self.dtype = problem, q.device, arithmetic(q.dtype)
        self.plan = plan_of(problem.pattern, self.nq, self.nk)
        self.columns = torch.arange(self.nk, device=self.device)
        self.sequences, self.at_once = at_once(q, k, self.plan)
        # which lengths cut off no key of a piece is known without waiting where they are at hand
        lengths = problem.key_lengths
        if lengths is None or self.batch == 0:
            self.whole = self.nk
        else:
            self.whole = int(lengths.min()) if lengths.device.type == "cpu" else 0
        exact = q.dtype == torch.float32 and problem.dropout_p == 0 and problem.q_segments is None
        self.flash = exact and q.device.type == "cpu"
        self.scratch = {}  # name -> room for the scores of a block, once somebody asks

    def groups_of_heads(self) -> Iterator[tuple[slice, slice]]:
        for b in range(0, self.batch, self.sequences):
            for h in range(0, self.heads, self.at_once):
                yield slice(b, min(b + self.sequences, self.batch)), slice(h, min(h + self.at_once, self.heads))

    def blocks(self, group: tuple[slice, slice]) -> Iterator[Block]:
        for number, pieces in enumerate(self.plan.pieces):
            rows = slice(number * TILE_Q, min((number + 1) * TILE_Q, self.nq))
            yield Block(*group, rows, pieces)

    def by_group(self, x: Tensor) -> Tensor:
        """View (B, Hkv, g, ...) of `x` (B, Hq, ...)."""
        return x.unflatten(1, (self.heads, self.groups))

    def keys(self, x: Tensor, block: Block, piece: Piece) -> Tensor:
        """The piece's keys of `x` (B, Hkv, Nk, D): (b, h, c, D)."""
        return piece.of(block.of_keys(x), 2).to(self.dtype)

    def goes_through_flash(self, piece: Piece) -> bool:
        return self.flash and piece.runs[-1][1] <= self.whole

    def multiply(self, a: Tensor, b: Tensor, into: str) -> Tensor:
        """Products of rows with rows: (b * h, g * n, c), in the scratch `into`."""
        if into not in self.scratch:
            number = self.sequences * self.at_once * self.groups * min(TILE_Q, self.nq) * self.plan.width
            self.scratch[into] = torch.empty(number, dtype=self.dtype, device=self.device)
        shape = a.shape[0], a.shape[1], b.shape[1]
        return torch.bmm(a, b.mT, out=self.scratch[into][: math.prod(shape)].view(shape))

    def hide(self, scores: Tensor, block: Block, piece: Piece):
        """Adds -inf to the scores of the pairs that do not count: on a CPU ten times as fast as `masked_fill_`."""
        problem, n = self.problem, block.rows.stop - block.rows.start
        scores = scores.view(-1, self.groups, n, piece.width)
        for first, end, numbers in piece.partial:
            scores[..., first:end].add_(self.plan.penalty(numbers, scores)[:n, : end - first])
        by_sequence = scores.view(block.sequences.stop - block.sequences.start, -1, n, piece.width)
        if piece.runs[-1][1] > self.whole:
            lengths = problem.key_lengths[block.sequences, None, None]
            by_sequence.add_(self.penalty(piece.of(self.columns, 0) >= lengths))
        if problem.q_segments is not None:
            mine = problem.q_segments[block.sequences, block.rows, None]
            theirs = piece.of(problem.k_segments[block.sequences], 1)[:, None]
            by_sequence.add_(self.penalty(mine != theirs))

    def penalty(self, hidden: Tensor) -> Tensor:
        """For a mask (b, n or 1, c)."""
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)[:, None]

    def kept(self, block: Block, piece: Piece) -> Tensor | None:
        """The dropout mask over 1 - p, in the shape of the scores."""
        p = self.problem.dropout_p
        if p == 0:
            return None
        heads = torch.arange(self.batch * self.heads * self.groups, device=self.device)
        heads = block.of_keys(heads.view(self.batch, self.heads, self.groups, 1))
        rows = torch.arange(block.rows.start, block.rows.stop, device=self.device)
        keys = row_keys(self.problem.seed, heads, rows).flatten(2).flatten(0, 1)
        return keep(keys[..., None], piece.of(self.columns, 0), p).to(self.dtype).div_(1 - p)


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """(out in q's dtype and layout, lse in float32 or float64: -inf where a row sees nothing, whose out is 0)."""
    walk = Walk(q, k, problem)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=walk.dtype)
    queries, outs, lses = walk.by_group(q), walk.by_group(out), walk.by_group(lse)
    for group in walk.groups_of_heads():
        for block in walk.blocks(group):
            for whole, part in zip((outs, lses), attend(walk, block, block.of_queries(queries), k, v)):
                whole = block.of_queries(whole)
                whole.copy_(part.view(whole.shape))
    return out, lse


def attend(walk: Walk, block: Block, queries: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out (b, h, g * n, D), lse (b, h, g * n)) of one block, piece after piece."""
    rows = queries.flatten(2, 3).to(walk.dtype)
    out, lse = None, rows.new_full(rows.shape[:3], -math.inf)
    for piece in block.pieces:
        keys, values = walk.keys(k, block, piece), walk.keys(v, block, piece)
        of_piece = flash_piece if walk.goes_through_flash(piece) else plain_piece
        part, part_lse = of_piece(walk, block, piece, rows, keys, values)
        del keys, values  # before the next piece's are copied
        out, lse = (part, part_lse) if out is None else merge(out, lse, part, part_lse)
    return torch.zeros_like(rows) if out is None else out, lse


def plain_piece(walk, block, piece, rows, keys, values) -> tuple[Tensor, Tensor]:
    """(out (b, h, g * n, D), lse (b, h, g * n)) of the keys of one piece, by matrix products."""
    weights = walk.multiply((rows * walk.problem.scale).flatten(0, 1), keys.flatten(0, 1), "weights")
    walk.hide(weights, block, piece)
    top = weights.amax(-1, keepdim=True)
    top.masked_fill_(top == -math.inf, 0.0)
    total = weights.sub_(top).exp_().sum(-1, keepdim=True)
    kept = walk.kept(block, piece)
    result = (weights if kept is None else weights.mul_(kept)) @ values.flatten(0, 1)
    result /= total.masked_fill(total == 0, 1.0)
    return result.view(rows.shape), (top + total.log()).view(rows.shape[:3])


def flash_piece(walk, block, piece, rows, keys, values) -> tuple[Tensor, Tensor]:
    """What `plain_piece` gives, by the fused kernel."""
    mask, blind = walk.plan.mask(piece, block.rows.stop - block.rows.start, walk.groups)
    out, lse = flash(rows, keys, values, 0.0, False, attn_mask=mask, scale=walk.problem.scale)
    if blind is not None:
        lse.masked_fill_(blind, -math.inf)
    return out, lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of two sets of keys together."""
    both = torch.logaddexp(lse, other_lse)
    base = both.masked_fill(both == -math.inf, 0.0)
    return out * (lse - base).exp_()[..., None] + other * (other_lse - base).exp_()[..., None], both


def backward(
    grad_out: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    problem: Problem,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each in the layout of its tensor. With `out`, `delta` is the sum of grad_out * out alone."""
    walk = Walk(q, k, problem)
    walk.flash &= out is not None
    exact = q.dtype == walk.dtype
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros_like(t) if exact else torch.empty_like(t) for t in (k, v))
    of_queries = [walk.by_group(t) for t in (q, grad_out, grad_out if out is None else out, delta, lse)]
    grad_qs = walk.by_group(grad_q)
    for group in walk.groups_of_heads():
        # 16-bit gradients are summed in float32, of some heads at a time
        sums = [g[group] if exact else torch.zeros_like(g[group], dtype=walk.dtype) for g in (grad_k, grad_v)]
        for block in walk.blocks(group):
            place = block.of_queries(grad_qs)
            place.copy_(
                differentiate(walk, block, [block.of_queries(t) for t in of_queries], k, v, sums).view(place.shape)
            )
        if not exact:
            grad_k[group].copy_(sums[0]), grad_v[group].copy_(sums[1])
    return grad_q, grad_k, grad_v


def differentiate(
    walk: Walk, block: Block, of_queries: list[Tensor], k: Tensor, v: Tensor, sums: list[Tensor]
) -> Tensor:
    """dq (b, h, g * n, D) of one block; what it gives dk and dv is added to `sums`."""
    rows, *others, lse = (t.flatten(2, 3).to(walk.dtype) for t in of_queries)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    result = torch.zeros_like(rows)
    for piece in block.pieces:
        keys, values = walk.keys(k, block, piece), walk.keys(v, block, piece)
        slopes = flash_slopes if walk.goes_through_flash(piece) else plain_slopes
        part, *shares = slopes(walk, block, piece, rows, keys, values, *others, lse)
        result += part
        for total, share in zip(sums, shares):
            piece.add(total, share, 2)
        del part, shares, share, keys, values
    return result


def plain_slopes(walk, block, piece, rows, keys, values, above, out, delta, lse) -> list[Tensor]:
    """dq (b, h, g * n, D), dk and dv (b, h, c, D) that come of one piece, by matrix products."""
    rows, keys, values, above = (t.flatten(0, 1) for t in (rows * walk.problem.scale, keys, values, above))
    weights = walk.multiply(rows, keys, "weights")
    walk.hide(weights, block, piece)
    weights.sub_(lse.flatten(0, 1)[..., None]).exp_()
    grads = walk.multiply(above, values, "grads")
    kept = walk.kept(block, piece)
    if kept is not None:
        grads.mul_(kept)
    grads.sub_(delta.flatten(0, 1)[..., None]).mul_(weights)
    dropped = weights if kept is None else weights.mul_(kept)
    shares = (grads @ keys).mul_(walk.problem.scale), grads.mT @ rows, dropped.mT @ above
    return [share.unflatten(0, lse.shape[:2]) for share in shares]


def flash_slopes(walk, block, piece, rows, keys, values, above, out, delta, lse) -> tuple[Tensor, ...]:
    """What `plain_slopes` gives, by the fused kernel."""
    mask, _ = walk.plan.mask(piece, block.rows.stop - block.rows.start, walk.groups)
    scale = walk.problem.scale
    return flash_backward(above, rows, keys, values, out, lse, 0.0, False, attn_mask=mask, scale=scale)


def scratch_bytes(q: Tensor, k: Tensor, pattern: Pattern, backward: bool) -> int:
    """What `forward` or `backward` takes beside its results, for lengths, segments and dropout left out."""
    plan = plan_of(pattern, q.shape[2], k.shape[2])
    sequences, heads = at_once(q, k, plan)
    dtype, size, groups = arithmetic(q.dtype), q.shape[3], q.shape[1] // k.shape[1]
    copied, grouped, flash = q.dtype != dtype, groups > 1, q.dtype == torch.float32 and q.device.type == "cpu"
    queries = groups * min(TILE_Q, q.shape[2])
    rows = sequences * heads * queries  # of a block
    tile_q = min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries)

    def of_piece(piece: Piece, merged: bool) -> int:
        """Copies of keys and values, their gradients; of the fused kernel, a tile of scores a thread, backward two."""
        columns = piece.width * (2 * backward + 2 * (copied or len(piece.runs) > 1))
        tile_k = min(512, piece.width)
        tile = torch.get_num_threads() * tile_q * (2 * tile_k if backward else tile_k + 2 + size)
        earlier = rows * size * merged  # the result so far; merged, the two scaled and their sum as well
        return sequences * heads * columns * size + max(flash * tile + earlier, (3 + flash) * earlier)

    # rows that are kept, copied, scaled; the results of one piece
    per_row = (3 if backward else 1) * (copied or grouped) + (not flash) + 1 + backward
    numbers = rows * size * (per_row + (backward and flash)) + 2 * rows
    numbers += 0 if flash else (1 + backward) * rows * plan.width
    seen = {(piece, number > 0 and not backward) for pieces in plan.pieces for number, piece in enumerate(pieces)}
    numbers += max((of_piece(*piece) for piece in seen), default=0)
    if backward and copied:
        numbers += 2 * sequences * heads * k.shape[2] * size
    return numbers * dtype.itemsize + k.shape[2] * 8
