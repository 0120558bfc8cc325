"""Sparse attention by PyTorch's own operators, in time and memory linear in the length: trains anywhere, CPUs first.

It walks the pattern's tiles, some heads and one tile of queries at a time. The keys a tile sees are a few runs of
consecutive ones: slices of k and v, so nothing of their size is copied. Where a tile sees very many keys (global
tokens, dense patterns) they are cut into pieces, whose results are merged by running maxima and sums (Milakov and
Gimelshein 2018, arXiv 1805.02867). The backward pass adds each tile's share to slices of dk and dv, in one order.

Shapes: q (B, Hq, Nq, D); k, v (B, Hkv, Nk, D). Of a block: b sequences, h key heads and their g = Hq / Hkv query heads
each, n queries, c keys of a piece; scores (b * h, g * n, c).
"""

import dataclasses
import itertools
import math
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lean_arch.ops.attention.dropout import keep, row_keys
from lean_arch.ops.attention.problem import Problem, arithmetic
from lean_arch.ops.attention.tiles import Tiles, compile_tiles
from lean_arch.ops.patterns import Pattern

TILE_Q, TILE_K = 64, 64
PIECE = 2048  # keys at a time
BLOCK = {"cpu": 2**19}  # scores at a time: about what stays in a cache; elsewhere 2^26
MASKS = 2**26  # bytes of unpacked masks that are kept with a pattern


@dataclasses.dataclass(frozen=True)
class Piece:
    """Keys of some query tile. runs: [first, end) of each run of keys; partial: (first column, end, mask numbers)."""

    runs: tuple[tuple[int, int], ...]
    partial: tuple[tuple[int, int, tuple[int, ...]], ...]
    width: int

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The piece's keys of `x`: a view where they are one run."""
        parts = [x.narrow(dim, first, end - first) for first, end in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def add(self, x: Tensor, other: Tensor, dim: int):
        """x += other at the piece's keys."""
        for (first, end), part in zip(self.runs, other.split([end - first for first, end in self.runs], dim)):
            x.narrow(dim, first, end - first).add_(part)


class Plan:
    """The pieces of each query tile, and the masks in them, unpacked."""

    def __init__(self, tiles: Tiles):
        starts = tiles.queries.starts.tolist()
        others, masks = tiles.queries.others.tolist(), tiles.queries.masks.tolist()
        self.tiles, self.unpacked, self.room = tiles, {}, MASKS
        known = {}  # equal pieces are kept once
        self.pieces = [
            tuple(
                known.setdefault(piece, piece)
                for at in range(first, end, PIECE // tiles.tile_k)
                for piece in [self._piece(others, masks, at, min(at + PIECE // tiles.tile_k, end))]
            )
            for first, end in itertools.pairwise(starts)
        ]
        self.width = max((piece.width for pieces in self.pieces for piece in pieces), default=0)

    def _piece(self, others, masks, first, end) -> Piece:
        runs, partial, width = [], [], 0
        for other, mask in zip(others[first:end], masks[first:end]):
            start = other * self.tiles.tile_k
            stop = min(start + self.tiles.tile_k, self.tiles.nk)
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
            if mask and partial and partial[-1][1] == width:
                partial[-1] = (partial[-1][0], width + stop - start, (*partial[-1][2], mask - 1))
            elif mask:
                partial.append((width, width + stop - start, (mask - 1,)))
            width += stop - start
        return Piece(tuple(runs), tuple(partial), width)

    def penalty(self, numbers: tuple[int, ...], like: Tensor) -> Tensor:
        """(tile_q, columns) in the dtype of `like`: -inf where a pair does not count, else 0; of masks side by side."""
        key = numbers, like.dtype, like.device
        found = self.unpacked.get(key)
        if found is None:
            bits = self.tiles.bits[list(numbers)].to(like.device)
            bit = torch.arange(32, dtype=torch.int32, device=like.device)
            hidden = (((bits[..., None] >> bit) & 1) == 0).flatten(2).transpose(0, 1).flatten(1)
            found = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)
            if found.nbytes <= self.room:
                self.room -= found.nbytes
                self.unpacked[key] = found
        return found


_plans = weakref.WeakKeyDictionary()


def plan_of(pattern: Pattern, nq: int, nk: int) -> Plan:
    tiles = compile_tiles(pattern, nq, nk, TILE_Q, TILE_K)
    if tiles not in _plans:
        with _disable_current_modes():  # real, also amid fake tensors
            _plans[tiles] = Plan(tiles)
    return _plans[tiles]


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

    def scratch(self) -> Tensor:
        """Room for the scores of a block."""
        number = self.sequences * self.at_once * self.groups * min(TILE_Q, self.nq) * self.plan.width
        return torch.empty(number, dtype=self.dtype, device=self.device)

    def groups_of_heads(self) -> Iterator[tuple[slice, slice]]:
        for b in range(0, self.batch, self.sequences):
            for h in range(0, self.heads, self.at_once):
                yield (
                    slice(b, min(b + self.sequences, self.batch)),
                    slice(h, min(h + self.at_once, self.heads)),
                )

    def blocks(self, sequences: slice, heads: slice) -> Iterator[Block]:
        for number, pieces in enumerate(self.plan.pieces):
            rows = slice(number * TILE_Q, min((number + 1) * TILE_Q, self.nq))
            yield Block(sequences, heads, rows, pieces)

    def by_group(self, x: Tensor) -> Tensor:
        """View (B, Hkv, g, ...) of `x` (B, Hq, ...)."""
        return x.unflatten(1, (self.heads, self.groups))

    def rows(self, x: Tensor) -> Tensor:
        """(b, h, g, n, ...) as (b * h, g * n, ...), in the dtype sums are made in."""
        return x.to(self.dtype).flatten(2, 3).flatten(0, 1)

    def keys(self, x: Tensor, block: Block, piece: Piece) -> Tensor:
        """The piece's keys of `x` (B, Hkv, Nk, D): (b * h, c, D)."""
        return piece.of(block.of_keys(x), 2).to(self.dtype).flatten(0, 1)

    def multiply(self, a: Tensor, b: Tensor, into: Tensor) -> Tensor:
        """Products of rows with rows: (b * h, g * n, c), in the scratch `into`."""
        shape = a.shape[0], a.shape[1], b.shape[1]
        return torch.bmm(a, b.mT, out=into[: math.prod(shape)].view(shape))

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
    out, lse, scratch = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=walk.dtype), walk.scratch()
    queries, outs, lses = walk.by_group(q), walk.by_group(out), walk.by_group(lse)
    for group in walk.groups_of_heads():
        for block in walk.blocks(*group):
            rows = walk.rows(block.of_queries(queries)) * problem.scale
            top = total = result = None
            for piece in block.pieces:
                weights = walk.multiply(rows, walk.keys(k, block, piece), scratch)
                walk.hide(weights, block, piece)
                new_top = weights.amax(-1, keepdim=True)
                new_top = new_top if top is None else torch.maximum(top, new_top)
                base = new_top.masked_fill(new_top == -math.inf, 0.0)
                weights.sub_(base).exp_()
                new_total = weights.sum(-1, keepdim=True)
                kept = walk.kept(block, piece)
                new_result = (weights if kept is None else weights.mul_(kept)) @ walk.keys(v, block, piece)
                if top is not None:
                    old = torch.exp(top - base)
                    new_total += total * old
                    new_result += result * old
                top, total, result = new_top, new_total, new_result
            if result is None:
                block.of_queries(outs).zero_(), block.of_queries(lses).fill_(-math.inf)
                continue
            block.of_queries(lses).copy_((top + total.log()).view_as(block.of_queries(lses)))
            result /= total.masked_fill_(total == 0, 1.0)
            block.of_queries(outs).copy_(result.view(block.of_queries(outs).shape))
    return out, lse


def backward(
    grad_out: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each in the layout of its tensor."""
    walk = Walk(q, k, problem)
    weights_scratch, grads_scratch = walk.scratch(), walk.scratch()
    exact = q.dtype == walk.dtype
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros_like(t) if exact else torch.empty_like(t) for t in (k, v))
    queries, grad_outs, deltas, lses, grad_qs = map(walk.by_group, (q, grad_out, delta, lse, grad_q))
    for group in walk.groups_of_heads():
        # 16-bit gradients are summed in float32, of some heads at a time
        sums = [g[group] if exact else torch.zeros_like(g[group], dtype=walk.dtype) for g in (grad_k, grad_v)]
        for block in walk.blocks(*group):
            rows, above = walk.rows(block.of_queries(queries)) * problem.scale, walk.rows(block.of_queries(grad_outs))
            row_delta, row_lse = (walk.rows(block.of_queries(t))[..., None] for t in (deltas, lses))
            row_lse = row_lse.masked_fill(row_lse == -math.inf, 0.0)
            result = torch.zeros_like(rows)
            for piece in block.pieces:
                keys, values = walk.keys(k, block, piece), walk.keys(v, block, piece)
                weights = walk.multiply(rows, keys, weights_scratch)
                walk.hide(weights, block, piece)
                weights.sub_(row_lse).exp_()
                grads = walk.multiply(above, values, grads_scratch)
                kept = walk.kept(block, piece)
                if kept is not None:
                    grads.mul_(kept)
                grads.sub_(row_delta).mul_(weights)
                dropped = weights if kept is None else weights.mul_(kept)
                for total, left, right in ((sums[0], grads, rows), (sums[1], dropped, above)):
                    piece.add(total, (left.mT @ right).view(*total.shape[:2], piece.width, walk.size), 2)
                result += grads @ keys
            block.of_queries(grad_qs).copy_((result * problem.scale).view(block.of_queries(grad_qs).shape))
        if not exact:
            grad_k[group].copy_(sums[0]), grad_v[group].copy_(sums[1])
    return grad_q, grad_k, grad_v


def scratch_bytes(q: Tensor, k: Tensor, pattern: Pattern, backward: bool) -> int:
    """What `forward` or `backward` takes beside its results, for lengths, segments and dropout left out."""
    plan = plan_of(pattern, q.shape[2], k.shape[2])
    sequences, heads = at_once(q, k, plan)
    dtype, size = arithmetic(q.dtype), q.shape[3]
    rows = sequences * heads * (q.shape[1] // k.shape[1]) * min(TILE_Q, q.shape[2])
    keys = sequences * heads * plan.width * size
    copied = q.dtype != dtype or any(len(piece.runs) > 1 for pieces in plan.pieces for piece in pieces)
    numbers = (1 + backward) * rows * plan.width + 4 * rows * size + ((1 + backward) * copied + backward) * keys
    if backward and q.dtype != dtype:
        numbers += 2 * sequences * heads * k.shape[2] * size
    return numbers * dtype.itemsize + k.shape[2] * 8
