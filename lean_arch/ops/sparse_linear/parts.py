"""The part that one update has in a layer: what it keeps of x, what it adds to y and to grad_x, its values' gradient.

Columns and Rows are a smaller dense layer from some inputs or to some outputs; Blocks and Entries a sparse matrix.

Shapes: as in layers.py; values as structures.py says.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lean_arch.ops.sparse_linear import plans
from lean_arch.ops.sparse_linear.layers import Convolution, Linear
from lean_arch.ops.sparse_linear.sparse import sparse_forward, sparse_input_gradient, sparse_values_gradient
from lean_arch.ops.sparse_linear.structures import Blocks, Columns, Entries, Structure, has_numbers, spread


@dataclass(frozen=True)
class Dense:
    """A layer from the channels `inputs` of x to the channels `outputs` of y; None: all of them."""

    layer: Linear | Convolution
    inputs: Tensor | None
    outputs: Tensor | None

    def keep(self, x: Tensor) -> Tensor:
        return x if self.inputs is None else x.index_select(1, self.inputs)

    def add_output(self, y: Tensor, kept: Tensor, values: Tensor) -> None:
        if self.outputs is None:
            self.layer.add_forward(y, kept, values)
        else:
            y.index_add_(1, self.outputs, self.layer.forward(kept, values))

    def add_input(self, grad_x: Tensor, grad: Tensor, values: Tensor) -> None:
        grad = self.seen(grad)
        if self.inputs is None:
            self.layer.add_input_gradient(grad_x, grad, values)
        else:
            shape = grad_x.shape[0], len(self.inputs), *grad_x.shape[2:]
            grad_x.index_add_(1, self.inputs, self.layer.input_gradient(grad, values, shape))

    def of_values(self, grad: Tensor, kept: Tensor, values: Tensor) -> Tensor:
        return self.layer.weight_gradient(self.seen(grad), kept, values.shape)

    def seen(self, grad: Tensor) -> Tensor:
        return grad if self.outputs is None else grad.index_select(1, self.outputs)


@dataclass(frozen=True)
class Sparse:
    """Entries or Blocks (`where` and `size` as plans.matrix takes them) that see the channels `inputs` of x."""

    layer: Linear | Convolution
    where: list[Tensor]
    size: list[int]
    kernel: list[int]
    inputs: Tensor | None
    backend: str

    def keep(self, x: Tensor) -> Tensor:
        return x if self.inputs is None else x.index_select(1, self.inputs)

    def add_output(self, y: Tensor, kept: Tensor, values: Tensor) -> None:
        sparse_forward(self.maps(y), self.maps(kept), values, *self.options())

    def add_input(self, grad_x: Tensor, grad: Tensor, values: Tensor) -> None:
        if self.inputs is None:
            sparse_input_gradient(self.maps(grad_x), self.maps(grad), values, *self.options())
            return
        some = grad_x.new_zeros(grad_x.shape[0], len(self.inputs), *grad_x.shape[2:])
        sparse_input_gradient(self.maps(some), self.maps(grad), values, *self.options())
        grad_x.index_add_(1, self.inputs, some)

    def of_values(self, grad: Tensor, kept: Tensor, values: Tensor) -> Tensor:
        return sparse_values_gradient(self.maps(grad), self.maps(kept), *self.options()).view(values.shape)

    def options(self):
        return self.where, self.size, self.kernel, self.layer.numbers(), self.backend

    @staticmethod
    def maps(x: Tensor) -> Tensor:
        return x if x.dim() == 4 else x[:, :, None, None]


def part_of(structure: Structure, layer: Linear | Convolution, weight_shape, groups: int, backend: str):
    """The part of an update with this structure in a layer."""
    kernel = list(weight_shape[2:]) or [1, 1]
    if isinstance(structure, Entries):
        return Sparse(layer, [structure.index], [], kernel, None, backend)
    if isinstance(structure, Blocks):
        columns, inputs = touched(structure, weight_shape[1])
        return Sparse(layer, [structure.rows, columns], list(structure.size), kernel, inputs, backend)
    if groups > 1:
        index, outputs = structure.index, weight_shape[0] // groups
        some = Convolution(layer.geometry._replace(groups=len(index)))
        return Dense(some, spread(index, weight_shape[1]), spread(index, outputs))
    by_input = isinstance(structure, Columns)
    return Dense(layer, structure.index if by_input else None, None if by_input else structure.index)


def touched(blocks: Blocks, inputs: int) -> tuple[Tensor, Tensor | None]:
    """The number of each block among those block columns that are touched, and the channels of these; None: all.

    Where the indices' numbers are not to be seen, each block has a block column of its own.
    """
    columns, slots = blocks.cols, torch.arange(len(blocks.cols), device=blocks.cols.device)
    if has_numbers(columns):
        columns, slots = plans.once(torch.Tensor.unique, [blocks.cols], True, True)
    channels = spread(columns, blocks.size[1])
    return (blocks.cols, None) if len(channels) >= inputs else (slots, channels)
