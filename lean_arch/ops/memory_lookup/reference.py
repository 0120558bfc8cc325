"""Weighted sums of rows of a table, and the products of rows of two tables: all that a lookup and its gradients take.

    out[b] = sum over the entries n of bag b of weights[n] * table[index[n]]
    dots[n] = sum over v of left[left_index[n], v] * right[right_index[n], v]

What the other backends are measured against. The same sum serves forward, where a bag is what a token reads, and
backward, where a bag is what read a row.

Shapes: table (S, V), index, weights (N,), offsets (B + 1,), bag b from offsets[b] to offsets[b + 1], out (B, V).
"""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bags(table: Tensor, index: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """out (B, V) in the table's dtype; an empty bag gives 0."""
    bag = torch.repeat_interleave(offsets.diff())
    rows = table[index].to(wide(table.dtype)) * weights[:, None]
    out = rows.new_zeros(len(offsets) - 1, table.shape[1])
    return out.index_add_(0, bag, rows.to(out.dtype)).to(table.dtype)


def dots(left: Tensor, left_index: Tensor, right: Tensor, right_index: Tensor) -> Tensor:
    """(N,), in float32 or float64."""
    dtype = wide(right.dtype)
    return (left[left_index].to(dtype) * right[right_index].to(dtype)).sum(1)
