"""Where in a weight the trained values of a sparse update lie: whole columns, whole rows, blocks, or single entries.

A structure holds indices and nothing that is trained; the values are a tensor beside it, of `values_shape`.

Shapes: weight (O, C, *kernel), O outputs and C inputs, without a kernel for linear layers and embeddings. With
`groups` > 1, a grouped convolution's, C counts the inputs of one group, and Columns and Rows name whole groups.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Shape = Sequence[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """All weights of some inputs. index (k,) int64, distinct; values (O, k, *kernel).

    With groups: of some groups' inputs, which is all weights of these groups; values (k O / groups, C, *kernel).
    """

    index: Tensor

    def values_shape(self, weight_shape: Shape, groups: int = 1) -> tuple[int, ...]:
        """Of the values for a weight (O, C, *kernel)."""
        outputs, inputs, *kernel = weight_shape
        if groups > 1:
            return len(self.index) * (outputs // groups), inputs, *kernel
        return outputs, len(self.index), *kernel

    def positions(self, weight_shape: Shape, groups: int = 1) -> Tensor:
        """The places of the values in weight.flatten(), int64, shaped as the values."""
        if groups > 1:
            return _every(weight_shape, self.index.device)[spread(self.index, weight_shape[0] // groups)]
        return _every(weight_shape, self.index.device).index_select(1, self.index)

    def to(self, device: torch.device | str) -> "Columns":
        """The same on another device."""
        return Columns(self.index.to(device))

    def check(self, weight_shape: Shape, groups: int = 1) -> None:
        """Raises ValueError where this does not fit a weight of `weight_shape`."""
        if groups > 1:
            _check_groups(self, weight_shape, groups)
        else:
            _check_numbers("Columns.index", self.index, weight_shape[1], f"inputs of the weight {tuple(weight_shape)}")


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """All weights of some outputs. index (k,) int64, distinct; values (k, C, *kernel).

    With groups: of some groups' outputs; values (k O / groups, C, *kernel).
    """

    index: Tensor

    def values_shape(self, weight_shape: Shape, groups: int = 1) -> tuple[int, ...]:
        """Of the values for a weight (O, C, *kernel)."""
        return len(self.index) * (weight_shape[0] // groups if groups > 1 else 1), *weight_shape[1:]

    def positions(self, weight_shape: Shape, groups: int = 1) -> Tensor:
        """The places of the values in weight.flatten(), int64, shaped as the values."""
        rows = spread(self.index, weight_shape[0] // groups) if groups > 1 else self.index
        return _every(weight_shape, self.index.device)[rows]

    def to(self, device: torch.device | str) -> "Rows":
        """The same on another device."""
        return Rows(self.index.to(device))

    def check(self, weight_shape: Shape, groups: int = 1) -> None:
        """Raises ValueError where this does not fit a weight of `weight_shape`."""
        if groups > 1:
            _check_groups(self, weight_shape, groups)
        else:
            _check_numbers("Rows.index", self.index, weight_shape[0], f"outputs of the weight {tuple(weight_shape)}")


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of bo outputs by bi inputs. rows, cols (n,) int64; size (bo, bi); values (n, bo, bi, *kernel).

    Block (row, col) begins at output row * bo and input col * bi and lies inside the weight as a whole.
    """

    rows: Tensor
    cols: Tensor
    size: tuple[int, int]

    def values_shape(self, weight_shape: Shape, groups: int = 1) -> tuple[int, ...]:
        """Of the values for a weight (O, C, *kernel)."""
        _refuse_groups(groups)
        return len(self.rows), *self.size, *weight_shape[2:]

    def positions(self, weight_shape: Shape, groups: int = 1) -> Tensor:
        """The places of the values in weight.flatten(), int64, shaped as the values."""
        _refuse_groups(groups)
        outputs, inputs = (spread(at, each).view(-1, each) for at, each in zip((self.rows, self.cols), self.size))
        return _every(weight_shape, self.rows.device)[outputs[:, :, None], inputs[:, None, :]]

    def to(self, device: torch.device | str) -> "Blocks":
        """The same on another device."""
        return Blocks(self.rows.to(device), self.cols.to(device), self.size)

    def check(self, weight_shape: Shape, groups: int = 1) -> None:
        """Raises ValueError where this does not fit a weight of `weight_shape`."""
        _refuse_groups(groups)
        size = tuple(self.size)
        if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise ValueError(f"Blocks.size {self.size!r} must be two whole numbers, 1 or more: outputs and inputs")
        for name, index, each, whole in zip(("rows", "cols"), (self.rows, self.cols), size, weight_shape):
            fitting = f"blocks of {each} that fit into {whole} of the weight {tuple(weight_shape)}"
            _check_numbers(f"Blocks.{name}", index, whole // each, fitting, distinct=False)
        if self.rows.shape != self.cols.shape:
            raise ValueError(f"Blocks.rows has {len(self.rows)} numbers and Blocks.cols {len(self.cols)}; one each")
        if has_numbers(self.rows):
            places = self.rows * (weight_shape[1] // size[1]) + self.cols
            if len(places.unique()) != len(places):
                raise ValueError("Blocks.rows and Blocks.cols name a block twice; each may come once")


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """Single weights. index (k,) int64, places in weight.flatten(), ascending and distinct; values (k,)."""

    index: Tensor

    def values_shape(self, weight_shape: Shape, groups: int = 1) -> tuple[int, ...]:
        """Of the values for a weight (O, C, *kernel)."""
        return (len(self.index),)

    def positions(self, weight_shape: Shape, groups: int = 1) -> Tensor:
        """The places of the values in weight.flatten(), int64, shaped as the values."""
        return self.index

    def to(self, device: torch.device | str) -> "Entries":
        """The same on another device."""
        return Entries(self.index.to(device))

    def check(self, weight_shape: Shape, groups: int = 1) -> None:
        """Raises ValueError where this does not fit a weight of `weight_shape`."""
        whole = f"places in the weight {tuple(weight_shape)}"
        _check_numbers("Entries.index", self.index, math.prod(weight_shape), whole, distinct=False)
        if has_numbers(self.index) and (self.index.diff() <= 0).any():
            raise ValueError("Entries.index must be ascending without repeats; index.unique() is")


Structure = Columns | Rows | Blocks | Entries


def spread(index: Tensor, each: int) -> Tensor:
    """The numbers of all members of some groups of `each`: (k,) -> (k * each,)."""
    return (index[:, None] * each + torch.arange(each, device=index.device)).flatten()


def has_numbers(index: Tensor) -> bool:
    """Whether its numbers can be looked at: not while a function is compiled or run without data."""
    return not (torch.compiler.is_compiling() or index.is_meta or isinstance(index, FakeTensor))


def _every(weight_shape, device):
    """The place of each weight, in the weight's shape."""
    return torch.arange(math.prod(weight_shape), device=device).view(tuple(weight_shape))


def _refuse_groups(groups):
    if groups > 1:
        raise ValueError(f"Blocks do not go with groups={groups}; Columns, Rows (of whole groups) and Entries do")


def _check_groups(structure, weight_shape, groups):
    name = f"{type(structure).__name__}.index"
    if weight_shape[0] % groups:
        raise ValueError(f"groups={groups} does not divide the {weight_shape[0]} outputs of the weight")
    _check_numbers(name, structure.index, groups, f"groups of the weight {tuple(weight_shape)}, groups={groups}")


def _check_numbers(name, index, limit, what, distinct=True):
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
        found = f"{index.dtype} {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise ValueError(f"{name} must be a tensor of int64 with one dimension, got {found}")
    if not has_numbers(index) or not len(index):
        return
    low, high = (n.item() for n in index.aminmax())
    if low < 0 or high >= limit:
        raise ValueError(f"{name} holds {low if low < 0 else high}, but there are {limit} {what}: 0 to {limit - 1}")
    if distinct and len(index.unique()) != len(index):
        raise ValueError(f"{name} holds a number twice; index.unique() does not")
