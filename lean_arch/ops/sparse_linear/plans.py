"""Sparse updates as sparse matrices, sorted both ways, worked out once for each index tensor.

A layer's weight is a matrix (O, R) whose columns are what a convolution multiplies at one place: R = C * taps inputs,
all channels, each with the taps of its window. Rows of a grouped convolution see the columns of their group only.

What is remembered takes 12 bytes a value of Entries, 16 of Blocks.

Shapes: values (k,) once flattened.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lean_arch.ops.sparse_linear.structures import spread

_known = {}  # what a plan was made from -> the plan


class Matrix(NamedTuple):
    """columns (k,) int32, row after row; row i has the entries offsets[i] to offsets[i + 1]; offsets (O + 1,) int32.

    order: (k,) int32, where the values of the entries stand; None: in the same order.
    """

    columns: Tensor
    offsets: Tensor
    order: Tensor | None

    def rows(self) -> Tensor:
        """(k,) int32, ascending."""
        each = torch.arange(len(self.offsets) - 1, dtype=torch.int32, device=self.offsets.device)
        return each.repeat_interleave(self.offsets.diff(), output_size=len(self.columns))

    def sorted(self, values: Tensor) -> Tensor:
        """(k,) values in the order of the entries."""
        values = values.flatten()
        return values if self.order is None else values[self.order]

    def unsorted(self, values: Tensor) -> Tensor:
        """What `sorted` undoes."""
        return values if self.order is None else torch.empty_like(values).index_copy_(0, self.order.long(), values)


class Shape(NamedTuple):
    """Of the layer: outputs O, inputs C of x, taps of the window, groups of the convolution."""

    outputs: int
    inputs: int
    taps: int
    groups: int


def once(make: Callable, indices: list[Tensor], *what):
    """make(*indices, *what), kept for as long as the tensors that hold the indices live and stay as they are."""
    owners = [index if index._base is None else index._base for index in indices]  # views come and go
    if any(owner.is_inference() for owner in owners):  # which nobody counts the changes of
        return make(*indices, *what)
    places = tuple((i.data_ptr(), i.shape, i.stride(), i.device) for i in indices)
    key = make, what, places, tuple((id(owner), owner._version) for owner in owners)
    if key not in _known:
        _known[key] = make(*indices, *what)
        for owner in owners:
            weakref.finalize(owner, _known.pop, key, None).atexit = False
    return _known[key]


def matrix(where: list[Tensor], size: list[int], shape: Shape, transposed: bool) -> Matrix:
    """Of Entries, where [index], or of Blocks, where [rows, columns of blocks in x], size [bo, bi]."""
    return once(_blocks if size else _entries, where, tuple(size), shape, transposed)


def _entries(index: Tensor, size, shape: Shape, transposed: bool) -> Matrix:
    width = shape.inputs // shape.groups * shape.taps
    rows, columns = index // width, index % width
    if shape.groups > 1:
        columns += rows // (shape.outputs // shape.groups) * width
    return _sorted(rows, columns, shape, transposed, ascending=True)


def _blocks(rows: Tensor, columns: Tensor, size, shape: Shape, transposed: bool) -> Matrix:
    (bo, bi), n = size, len(rows)
    rows = spread(rows, bo).view(n, bo, 1).expand(n, bo, bi * shape.taps)
    columns = spread(columns, bi * shape.taps).view(n, 1, -1).expand_as(rows)
    return _sorted(rows.flatten(), columns.flatten(), shape, transposed, ascending=False)


def _sorted(rows, columns, shape, transposed, ascending):
    height, width = shape.outputs, shape.inputs * shape.taps
    if transposed:
        rows, columns, height, width = columns, rows, width, height
    order = None
    if transposed or not ascending:
        order = (rows * width + columns).argsort()
        rows, columns = rows[order], columns[order]
        order = order.int()
    offsets = torch.searchsorted(rows, torch.arange(height + 1, device=rows.device), out_int32=True)
    return Matrix(columns.int(), offsets, order)
