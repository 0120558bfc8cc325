"""What an attention call is about, beside q, k and v: the same for every backend.

Shapes: B batch, Hq and Hkv heads of queries and of keys, Nq queries, Nk keys, D head size.
q (B, Hq, Nq, D); k, v (B, Hkv, Nk, D), query head h reads key head h // (Hq / Hkv).
"""

import dataclasses

import torch
from torch import Tensor

from lean_arch.ops.patterns import Pattern


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A pair (i, j) counts where the pattern allows it, j < key_lengths[b] and the segments of i and j are the same.

    key_lengths (B,) int32; q_segments (B, Nq) and k_segments (B, Nk) int32, both or none; dropout_p share of weights
    set to zero, seed (1,) int64 (see dropout.py).
    """

    pattern: Pattern
    scale: float
    key_lengths: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
