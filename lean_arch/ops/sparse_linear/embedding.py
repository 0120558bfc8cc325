"""An embedding's part of every structure: what it adds to y, and the values' gradient.

A row of the table is trained in a few columns, as a whole or at some entries; which of them a token meets depends on
its id. Gradients of what several tokens share are summed by embedding's own backward, which is deterministic.

Shapes: ids (N,), weight (V, D), y, grad (N, D), values as structures.py says.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.sparse_linear import plans
from lean_arch.ops.sparse_linear.plans import Matrix
from lean_arch.ops.sparse_linear.structures import Blocks, Columns, Rows, Structure


def gather_gradient(grad: Tensor, ids: Tensor, rows: int, padding: int = -1) -> Tensor:
    """(rows, D): the sum of those rows of grad (N, D) whose id it is; none for `padding`."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    return torch.ops.aten.embedding_dense_backward(grad.to(wide), ids, rows, padding, False)


def slots(index: Tensor, ids: Tensor) -> Tensor:
    """Where each id stands in `index`; len(index) where it does not."""
    ordered, order = index.sort()
    place = torch.searchsorted(ordered, ids).clamp_(max=len(index) - 1)
    return torch.where(ordered[place] == ids, order[place], len(index))


def add_output(y: Tensor, ids: Tensor, values: Tensor, structure: Structure, rows: int) -> None:
    """y += the update's rows `ids`."""
    values = values.to(y.dtype)
    if isinstance(structure, Columns):
        y.index_add_(1, structure.index, F.embedding(ids, values))
    elif isinstance(structure, Rows):
        y += F.embedding(slots(structure.index, ids), F.pad(values, (0, 0, 0, 1)))  # a row of zeros for the others
    else:
        embedding_forward(y, ids, values, *described(structure), rows)


def of_values(grad: Tensor, ids: Tensor, values: Tensor, structure: Structure, rows: int, padding: int) -> Tensor:
    """The values' gradient; the row `padding` has none."""
    if isinstance(structure, Columns):
        return gather_gradient(grad.index_select(1, structure.index), ids, rows, padding)
    if isinstance(structure, Rows):
        count = len(structure.index)
        places = slots(structure.index, ids).masked_fill_(ids == padding, count)
        return gather_gradient(grad, places, count + 1, count)[:count]
    return embedding_values_gradient(grad, ids, *described(structure), rows, padding).view(values.shape)


def described(structure: Structure) -> tuple[list[Tensor], list[int]]:
    if isinstance(structure, Blocks):
        return [structure.rows, structure.cols], list(structure.size)
    return [structure.index], []


def met(entries: Matrix, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The entries that each token meets, one token's after another's, and their places in y.flatten()."""
    first = entries.offsets[ids].long()
    counts = entries.offsets[ids + 1] - first
    tokens = torch.arange(len(ids), device=ids.device).repeat_interleave(counts)
    start = counts.cumsum(0) - counts
    entry = torch.arange(len(tokens), device=ids.device) + (first - start)[tokens]
    return entry, tokens * width + entries.columns[entry]


@torch.library.custom_op("lean_arch::sparse_embedding_forward", mutates_args=("y",))
def embedding_forward(y: Tensor, ids: Tensor, values: Tensor, where: list[Tensor], size: list[int], rows: int) -> None:
    entries = plans.matrix(where, size, plans.Shape(rows, y.shape[1], 1, 1), False)
    entry, place = met(entries, ids, y.shape[1])
    y.view(-1).index_add_(0, place, entries.sorted(values)[entry])


@torch.library.custom_op("lean_arch::sparse_embedding_values_gradient", mutates_args=())
def embedding_values_gradient(
    grad: Tensor, ids: Tensor, where: list[Tensor], size: list[int], rows: int, padding: int
) -> Tensor:
    entries = plans.matrix(where, size, plans.Shape(rows, grad.shape[1], 1, 1), False)
    entry, place = met(entries, ids, grad.shape[1])
    grad = grad.flatten()[place].masked_fill_(ids[place // grad.shape[1]] == padding, 0)
    return entries.unsorted(gather_gradient(grad[:, None], entry, len(entries.columns))[:, 0])


@embedding_forward.register_fake
def _(y, ids, values, where, size, rows):
    pass


@embedding_values_gradient.register_fake
def _(grad, ids, where, size, rows, padding):
    numbers = len(where[0])
    for n in size:
        numbers *= n
    return grad.new_empty(numbers)
