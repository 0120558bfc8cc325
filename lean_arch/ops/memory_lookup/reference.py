"""A weighted sum of rows of a table, and its gradients, as a student would write them down.

    out[t] = sum over k of weights[t, k] * table[index[t, k]]

What the other backends are measured against. A negative index stands for nothing.

Shapes: table (S, V), index, weights (T, K), out, grad (T, V); order (N,) numbers of entries, t * K + k, of which those
from offsets[r] to offsets[r + 1] are the readers of the r-th of R rows.
"""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """(T, K, V), 0 where there is none."""
    return table[index.clamp(min=0)].to(wide(table.dtype)) * (index >= 0)[..., None]


def forward(table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """out, in the table's dtype."""
    return (weights[..., None] * rows_of(table, index)).sum(1).to(table.dtype)


def by_weights(grad: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """The gradient of weights (T, K), in float32 or float64."""
    return (grad[:, None] * rows_of(table, index)).sum(-1)


def by_rows(grad: Tensor, weights: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """The gradients of the rows (R, V), in float32 or float64."""
    entries = order[offsets[0] :]
    row = torch.repeat_interleave(offsets.diff())
    each = grad.to(wide(grad.dtype))[entries // weights.shape[1]] * weights.flatten()[entries, None]
    return each.new_zeros(len(offsets) - 1, grad.shape[1]).index_add_(0, row, each)
