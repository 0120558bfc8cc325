"""The keys that a tile of queries sees, as a few runs of consecutive ones: slices, which copy nothing.

Shapes: tile_q queries of a tile, c keys of a piece.
"""

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lean_arch.ops.attention.tiles import Tiles, compile_tiles
from lean_arch.ops.patterns import Pattern

TILE_Q, TILE_K = 64, 64
PIECE = 2048  # keys at a time
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

        def unpack():
            bits = self.tiles.bits[list(numbers)].to(like.device)
            bit = torch.arange(32, dtype=torch.int32, device=like.device)
            hidden = (((bits[..., None] >> bit) & 1) == 0).flatten(2).transpose(0, 1).flatten(1)
            return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)

        return self._kept((numbers, like.dtype, like.device), unpack)

    def mask(self, piece: Piece, n: int, groups: int) -> tuple[Tensor | None, Tensor | None]:
        """(penalty of a whole piece (groups * n, c) for `n` queries of `groups` heads, the rows it leaves blind).

        float32 on the CPU, and bool; None where there is none.
        """
        if not piece.partial:
            return None, None

        def join():
            whole = torch.zeros(n, piece.width)
            for first, end, numbers in piece.partial:
                whole[:, first:end] = self.penalty(numbers, whole)[:n, : end - first]
            return whole.repeat(groups, 1)

        mask = self._kept((piece.partial, piece.width, n, groups), join)
        blind = self._kept((piece.partial, piece.width, n, groups, "blind"), lambda: (mask == -math.inf).all(1))
        return mask, blind if blind.any() else None

    def _kept(self, key, make: Callable[[], Tensor]) -> Tensor:
        found = self.unpacked.get(key)
        if found is None:
            found = make()
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
