"""A linear layer's part of every structure: what it keeps of x, what it adds to y and grad_x, the values' gradient.

Shapes: x, grad_x (T, C), weight (O, C), y, grad (T, O), values as structures.py says; k columns or rows, n blocks.
"""

import importlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.plain_convolution import arithmetic
from lean_arch.ops.sparse_linear import csr
from lean_arch.ops.sparse_linear.reference import is_quantised, plain
from lean_arch.ops.sparse_linear.structures import Blocks, Columns, Entries, Rows, spread

ROOMS = {"torch": "portable", "triton": "kernels"}


def room(backend: str):
    """The module that holds a backend's products with single entries."""
    return importlib.import_module(f"lean_arch.ops.sparse_linear.{ROOMS[backend]}")


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    bias = None if bias is None else bias.to(dtype)
    return F.linear(x, weight if is_quantised(weight) else weight.to(dtype), bias)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    weight = plain(weight)
    if arithmetic(grad.dtype, grad.device) != grad.dtype:
        return F.linear(grad, weight.t().to(grad.dtype, memory_format=torch.contiguous_format))  # as ops/linear.py does
    return grad @ weight.to(grad.dtype)


@dataclass(frozen=True)
class OfColumns:
    structure: Columns
    backend: str

    def keep(self, x):
        return x.index_select(1, self.structure.index)

    def add_output(self, y, kept, values):
        y.addmm_(kept, values.t())

    def add_input(self, grad_x, grad, values):
        grad_x.index_add_(1, self.structure.index, grad @ values)

    def of_values(self, grad, kept, weight_shape):
        return grad.t() @ kept


@dataclass(frozen=True)
class OfRows:
    structure: Rows
    backend: str

    def keep(self, x):
        return x

    def add_output(self, y, kept, values):
        y.index_add_(1, self.structure.index, kept @ values.t())

    def add_input(self, grad_x, grad, values):
        grad_x.addmm_(grad.index_select(1, self.structure.index), values)

    def of_values(self, grad, kept, weight_shape):
        return grad.index_select(1, self.structure.index).t() @ kept


@dataclass(frozen=True)
class OfBlocks:
    structure: Blocks
    backend: str

    def keep(self, x):
        return x.index_select(1, spread(self.structure.cols.unique(), self.structure.size[1]))

    def add_output(self, y, kept, values):
        (n, bo, bi), slots = values.shape, self.structure.cols.unique(return_inverse=True)[1]
        parts = kept.view(len(kept), -1, bi)[:, slots].transpose(0, 1) @ values.mT
        y.index_add_(1, spread(self.structure.rows, bo), parts.transpose(0, 1).reshape(len(y), n * bo))

    def add_input(self, grad_x, grad, values):
        n, bo, bi = values.shape
        parts = self.outputs(grad, bo) @ values
        grad_x.index_add_(1, spread(self.structure.cols, bi), parts.transpose(0, 1).reshape(len(grad), n * bi))

    def of_values(self, grad, kept, weight_shape):
        (bo, bi), slots = self.structure.size, self.structure.cols.unique(return_inverse=True)[1]
        return self.outputs(grad, bo).mT @ kept.view(len(kept), -1, bi)[:, slots].transpose(0, 1)

    def outputs(self, grad, bo):
        return grad[:, spread(self.structure.rows, bo)].view(len(grad), -1, bo).transpose(0, 1)


@dataclass(frozen=True)
class OfEntries:
    structure: Entries
    backend: str

    def keep(self, x):
        return x

    def add_output(self, y, kept, values):
        room(self.backend).add_product(y, kept, values, csr.by_row(self.structure.index, y.shape[1], kept.shape[1]))

    def add_input(self, grad_x, grad, values):
        entries, order = csr.by_column(self.structure.index, grad.shape[1], grad_x.shape[1])
        room(self.backend).add_product(grad_x, grad, values[order], entries)

    def of_values(self, grad, kept, weight_shape):
        return room(self.backend).sampled_product(grad, kept, csr.by_row(self.structure.index, *weight_shape))


PARTS = {Columns: OfColumns, Rows: OfRows, Blocks: OfBlocks, Entries: OfEntries}
