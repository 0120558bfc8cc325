"""Dropout whose mask is a function of (seed, head, row, column): nothing is stored, and every backend drops the same.

A 32-bit integer hash (lowbias32, https://nullprogram.com/blog/2018/07/31/) is mixed over the coordinates:

    row key = mix(mix(mix(mix(seed high) ^ seed low) ^ (b * Hq + h)) ^ i)
    kept    = mix(row key ^ (j * GOLDEN)) >= p * 2^32                        (all of it unsigned, modulo 2^32)

so that a tile of scores costs one `mix` a score. The kernels compute the same with the same constants.
"""

import torch
from torch import Tensor

FIRST, SECOND, GOLDEN = 0x7FEB352D, 0x846CA68B, 0x9E3779B1
MASK = 0xFFFFFFFF


def threshold(p: float) -> int:
    """A weight is kept where its hash, unsigned, is this or more."""
    return min(round(p * 2**32), MASK)


def mix(x: Tensor) -> Tensor:
    """lowbias32 of int64 values below 2^32: products wrap modulo 2^64, which leaves the lower 32 bits right."""
    x = x ^ (x >> 16)
    x = (x * FIRST) & MASK
    x = x ^ (x >> 15)
    x = (x * SECOND) & MASK
    return x ^ (x >> 16)


def row_keys(seed: Tensor, heads: Tensor, rows: Tensor) -> Tensor:
    """int64 keys of `heads` (b * Hq + h) and `rows` (0 to Nq - 1), which broadcast; seed (1,) int64."""
    key = mix(mix((seed >> 32) & MASK) ^ (seed & MASK))
    return mix(mix(key ^ heads) ^ rows)


def keep(keys: Tensor, columns: Tensor, p: float) -> Tensor:
    """bool, True where the weight stays; `keys` of the rows (..., rows, 1) and `columns` (columns,) int64."""
    return mix(keys ^ ((columns * GOLDEN) & MASK)) >= threshold(p)


def keep_all(seed: Tensor, batch: int, heads: int, nq: int, nk: int, p: float) -> Tensor:
    """The whole mask, bool (B, Hq, Nq, Nk)."""
    count = torch.arange(batch * heads, device=seed.device).view(batch, heads, 1, 1)
    keys = row_keys(seed, count, torch.arange(nq, device=seed.device)[:, None])
    return keep(keys, torch.arange(nk, device=seed.device), p)
