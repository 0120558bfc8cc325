"""A pattern cut into tiles: for each tile of queries the tiles of keys it sees, and the other way round.

This is all that the kernels know of a pattern. It takes memory for the tiles that are computed, not for Nq x Nk
pairs: masks inside tiles are kept once each, as bits, and a band needs a handful of them whatever its length.
"""

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lean_arch.ops.patterns import ALL, NONE, Pattern, Span

PAIRS = 2**24  # examined at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Lists:
    """For tile number t of one side: the tiles `others[starts[t]:starts[t + 1]]` of the other, rising.

    starts (T + 1,) and others (E,) int32; masks (E,) int32: 0 where every pair of the tile counts, else 1 + the row
    of `Tiles.bits` that says which.
    """

    starts: Tensor
    others: Tensor
    masks: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
    """queries: the key tiles of each query tile; keys: the query tiles of each key tile.

    bits (M, tile_q, tile_k / 32) int32: bit c % 32 of [m, r, c // 32] is set where row r of the query tile may see
    column c of the key tile. Rows beyond Nq and columns beyond Nk are whatever they are: who reads the tiles checks.
    """

    nq: int
    nk: int
    tile_q: int
    tile_k: int
    queries: Lists
    keys: Lists
    bits: Tensor

    @property
    def area(self) -> int:
        """Pairs in all the tiles, those beyond the ends left out."""
        with _disable_current_modes():
            rows = (torch.arange(len(self.queries.starts)) * self.tile_q).clamp(max=self.nq).diff()
            columns = (torch.arange(len(self.keys.starts)) * self.tile_k).clamp(max=self.nk).diff()
            per_row = rows.repeat_interleave(self.queries.starts.diff())
            return int((per_row * columns[self.queries.others.long()]).sum())

    def masks(self) -> Tensor:
        """`bits` as bool (M, tile_q, tile_k)."""
        bit = torch.arange(32, dtype=torch.int32)
        return ((self.bits[..., None] >> bit) & 1).bool().flatten(2)


@functools.lru_cache(64)
def compile_tiles(
    pattern: Pattern, nq: int, nk: int, tile_q: int = 64, tile_k: int = 64, device: str | torch.device = "cpu"
) -> Tiles:
    """The tiles of `pattern` for `nq` queries and `nk` keys, on `device`. `tile_k` is a multiple of 32."""
    if torch.device(device).type != "cpu":
        tiles = compile_tiles(pattern, nq, nk, tile_q, tile_k)
        lists = (Lists(*(t.to(device) for t in vars(side).values())) for side in (tiles.queries, tiles.keys))
        return Tiles(nq, nk, tile_q, tile_k, *lists, tiles.bits.to(device))
    with _disable_current_modes(), torch.inference_mode(False), torch.device("cpu"):  # real, also amid fake tensors
        pattern.check(nq, nk)
        rows, columns, whole = _seen(pattern, nq, nk, tile_q, tile_k)
        masks, bits = _examine(pattern, rows[~whole], columns[~whole], nq, nk, tile_q, tile_k)
        kinds = torch.zeros(len(rows), dtype=torch.int64)
        kinds[~whole] = masks
        kept = kinds >= 0
        rows, columns, kinds = rows[kept], columns[kept], kinds[kept]
        number_q, number_k = -(-nq // tile_q), -(-nk // tile_k)
        return Tiles(
            nq, nk, tile_q, tile_k, _lists(rows, columns, kinds, number_q), _lists(columns, rows, kinds, number_k), bits
        )


def _seen(pattern, nq, nk, tile_q, tile_k) -> tuple[Tensor, Tensor, Tensor]:
    """(query tile, key tile, whether all of its pairs count) of the tiles of which the pattern may want a pair.

    Found from large squares of tiles down to single ones, so that what is far from the pattern is never looked at.
    """
    rows = columns = torch.zeros(1, dtype=torch.int64)
    number_q, number_k = -(-nq // tile_q), -(-nk // tile_k)
    size = 1 << max(number_q - 1, number_k - 1, 0).bit_length()
    while True:
        i = _span(rows, size * tile_q, nq, nk - nq)
        j = _span(columns, size * tile_k, nk, 0)
        cover = pattern.cover(i, j, nq, nk)
        keep = cover != NONE
        rows, columns, cover = rows[keep], columns[keep], cover[keep]
        if size == 1:
            return rows, columns, cover == ALL
        size //= 2
        rows = (rows[:, None] * 2 + torch.tensor([0, 0, 1, 1])).flatten()
        columns = (columns[:, None] * 2 + torch.tensor([0, 1, 0, 1])).flatten()
        inside = (rows * size < number_q) & (columns * size < number_k)
        rows, columns = rows[inside], columns[inside]


def _span(numbers: Tensor, size: int, length: int, offset: int) -> Span:
    return Span(numbers * size + offset, (numbers * size + size).clamp(max=length) - 1 + offset)


def _examine(pattern, rows, columns, nq, nk, tile_q, tile_k) -> tuple[Tensor, Tensor]:
    """(for each tile 0 if every pair counts, -1 if none does, else 1 + its row in bits; bits)."""
    kinds, known, found = [], {}, []
    for some_rows, some_columns in zip(*(t.split(max(PAIRS // (tile_q * tile_k), 1)) for t in (rows, columns))):
        r = some_rows[:, None, None] * tile_q + torch.arange(tile_q)[:, None]
        c = some_columns[:, None, None] * tile_k + torch.arange(tile_k)
        inside = (r < nq) & (c < nk)
        allowed = pattern.allows(r.clamp(max=nq - 1) + nk - nq, c.clamp(max=nk - 1), nq, nk) & inside
        every, some = (allowed == inside).flatten(1).all(1), allowed.flatten(1).any(1)
        packed = np.packbits(allowed.numpy(), axis=-1, bitorder="little")
        for one, full, any_ in zip(packed, every.tolist(), some.tolist()):
            if full or not any_:
                kinds.append(0 if full else -1)
                continue
            key = one.tobytes()
            if key not in known:
                known[key] = len(found) + 1
                found.append(one.view("<i4"))
            kinds.append(known[key])
    bits = np.stack(found) if found else np.zeros((0, tile_q, tile_k // 32), np.int32)
    return torch.tensor(kinds, dtype=torch.int64), torch.from_numpy(bits.astype(np.int32))


def _lists(tiles: Tensor, others: Tensor, kinds: Tensor, number: int) -> Lists:
    order = (tiles * (int(others.max()) + 1 if len(others) else 1) + others).argsort()
    starts = torch.zeros(number + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(tiles, minlength=number).cumsum(0)
    return Lists(starts.int(), others[order].int(), kinds[order].int())
