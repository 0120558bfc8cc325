"""Moving a sparse adapter to other weights while it trains: what changed least is dropped, what pulls most is grown.

Evci et al. 2020, "Rigging the Lottery" (arXiv 1911.11134); of fine-tuning: Ansell et al. 2024, "Scaling Sparse
Fine-Tuning to Large Language Models" (arXiv 2401.16405).

A unit is what a structure trains as one: a column, a row, a block, a group of a grouped convolution, or an entry.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lean_arch.adapters.merge import all_merged
from lean_arch.adapters.method import method_of
from lean_arch.adapters.selection import each_gradient, groups_of
from lean_arch.adapters.sparse import Sparse, SparsePart
from lean_arch.adapters.targets import Layer, find_layers


def regrow(
    model: nn.Module, name: str, loss: Callable[[], Tensor], fraction: float = 0.1, optimizer: Optimizer | None = None
) -> int:
    """Lets the sparse adapter `name` train other weights, in place: its parameters stay. Returns how many units moved.

    In every layer the `fraction` of units whose values are smallest goes back to the base, at least one, and as many of
    those that were not trained begin at zero where the gradient is largest. Gradients of weights exist for one layer
    at a time.

    Args:
        loss: a function without arguments that computes the loss of a batch with `model`.
        fraction: share of the units, above 0 and at most 1.
        optimizer: its state moves along with the values, and begins at zero for new ones.

    Raises ValueError for an adapter that is not sparse or is merged, an n:m structure, or a fraction out of range.
    """
    method = method_of(model, name)
    if not isinstance(method, Sparse) or groups_of(method.structure, method.density):
        raise ValueError(
            f"name {name!r} is an adapter that cannot regrow; 'sparse' of columns, rows, blocks, entries can"
        )
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction {fraction!r} must be a share above 0 and at most 1")
    parts = {path: part for path, _, part in method.parts(model, name)}
    if any(part.merged for part in parts.values()):
        raise ValueError(f"name {name!r} is merged; unmerge it before it regrows")
    moved = []

    def visit(layer: Layer, gradient: Tensor) -> None:
        moved.append(move(parts[layer.name], layer, gradient, fraction, optimizer))

    layers = [layer for layer in find_layers(model, ".*") if layer.name in parts]
    with all_merged(model):
        each_gradient(layers, loss, visit)
    return sum(moved)


@torch.no_grad()
def move(part: SparsePart, layer: Layer, gradient: Tensor, fraction: float, optimizer: Optimizer | None) -> int:
    """Moves units of one layer, whose weight has the `gradient`. Returns how many."""
    pull = of_units(part, gradient.abs().float(), layer.groups)
    trained = numbers(part, layer)
    size = part_units(part, part.values.abs().float(), layer.groups).flatten(1).sum(1)
    pull[trained] = -1
    count = min(max(round(fraction * len(trained)), 1), len(pull) - len(trained))
    kept = size.topk(len(size) - count, sorted=False).indices
    grown = pull.topk(count, sorted=False).indices
    joined = torch.cat([trained[kept], grown])
    order = joined.argsort()
    source = torch.cat([kept, kept.new_full((count,), -1)])[order]  # the unit before that each was; -1: new
    write_numbers(part, layer, joined[order])
    for tensor in [part.values, *states(optimizer, part.values)]:
        units = part_units(part, tensor, layer.groups)
        moved = units[source.clamp_min(0)]
        moved[source < 0] = 0
        units.copy_(moved)
    return count


def part_units(part: SparsePart, values: Tensor, groups: int) -> Tensor:
    """The values (or state of their shape) with units first, a view."""
    if part.kind == "columns" and groups == 1:
        return values.transpose(0, 1)
    if part.kind in ("columns", "rows") and groups > 1:
        return values.view(len(part.index), -1, *values.shape[1:])
    return values[:, None] if values.dim() == 1 else values


def of_units(part: SparsePart, score: Tensor, groups: int) -> Tensor:
    """The sum of a score of the whole weight over each unit there could be."""
    if part.kind == "entries":
        return score.flatten()
    if groups > 1:
        return score.view(groups, -1).sum(1)
    flat = score.flatten(2).sum(2) if score.dim() > 2 else score
    if part.kind == "blocks":
        high, wide = part.size
        return flat.view(flat.shape[0] // high, high, flat.shape[1] // wide, wide).sum((1, 3)).flatten()
    return flat.sum(0 if part.kind == "columns" else 1)


def numbers(part: SparsePart, layer: Layer) -> Tensor:
    """Of the units that are trained, among all."""
    if part.kind != "blocks":
        return part.index
    return part.index[0] * (layer.weight.shape[1] // part.size[1]) + part.index[1]


def write_numbers(part: SparsePart, layer: Layer, units: Tensor) -> None:
    if part.kind == "blocks":
        wide = layer.weight.shape[1] // part.size[1]
        units = torch.stack([units // wide, units % wide])
    part.index.copy_(units)


def states(optimizer: Optimizer | None, parameter: nn.Parameter) -> list[Tensor]:
    """The optimizer's tensors that hold a number for each of the parameter's."""
    state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    return [t for t in state.values() if isinstance(t, Tensor) and t.shape == parameter.shape and t.dim()]
