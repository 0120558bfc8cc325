"""Sorted entries of a matrix row by row and column by column, worked out once for each index tensor.

Shapes: index (k,) of a matrix (O, C).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Csr(NamedTuple):
    """rows, columns (k,), ascending by row; row i has the entries offsets[i] to offsets[i + 1]; offsets (O + 1,)."""

    rows: Tensor
    columns: Tensor
    offsets: Tensor


def by_row(index: Tensor, outputs: int, inputs: int) -> Csr:
    rows, columns = index // inputs, index % inputs
    return Csr(rows, columns, torch.searchsorted(rows, torch.arange(outputs + 1, device=index.device)))


def by_column(index: Tensor, outputs: int, inputs: int) -> tuple[Csr, Tensor]:
    """The transposed matrix, and where its entries stand in `index`."""
    columns, order = (index % inputs).sort(stable=True)
    offsets = torch.searchsorted(columns, torch.arange(inputs + 1, device=index.device))
    return Csr(columns, index[order] // inputs, offsets), order
