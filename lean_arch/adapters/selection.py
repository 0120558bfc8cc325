"""Which weights a sparse adapter trains: those that count most by a score, columns, rows, blocks or single ones.

Shapes: weight and its score (O, C) or (O, C, *kernel), C inputs a group.
"""

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lean_arch.adapters.layers import mixin_for
from lean_arch.adapters.targets import Layer

STRUCTURES = "column", "row", "block", "n:m", "unstructured"
SELECTIONS = "magnitude", "activation", "gradient", "random"
NM = re.compile(r"(\d+):(\d+)")


def groups_of(structure: str, density: float) -> tuple[int, int] | None:
    """(n, m) of an n:m structure, None for another; "n:m" itself is 1 in as many as the density says."""
    if structure == "n:m":
        return 1, max(round(1 / density), 1)
    match = NM.fullmatch(structure)
    return (int(match[1]), int(match[2])) if match else None


def check_structure(structure: str) -> None:
    """Raises ValueError for a name that is none of STRUCTURES or a pair such as 2:4."""
    match = NM.fullmatch(structure) if isinstance(structure, str) else None
    if match and not 0 < int(match[1]) <= int(match[2]):
        raise ValueError(f"structure {structure!r} trains more of a group than there is; 2:4 trains 2 in 4")
    if not match and structure not in STRUCTURES:
        raise ValueError(f"structure {structure!r} does not exist; {', '.join(STRUCTURES)} and pairs as 2:4 do")


def choose(score: Tensor, layer: Layer, structure: str, density: float, size: tuple[int, int] | None):
    """(kind, index, size) of the best by `score`; see `sparse.SparsePart`. At least one of each is chosen."""
    shape, rows = score.shape, layer.rows
    if rows is not None:
        score = score.index_select(0, rows)
    flat = score.flatten(2).sum(2) if score.dim() > 2 else score  # (O, C)
    if score.dim() < 2 or structure == "unstructured":
        return "entries", places(best(score.flatten(), density), shape, rows), None
    if pair := groups_of(structure, density):
        return "entries", places(best_of_groups(score.flatten(1), *pair), shape, rows), None
    if layer.groups > 1:
        whole = flat.sum(1).view(layer.groups, -1).sum(1)  # a group of a grouped convolution is one block of its own
        return ("rows" if structure == "row" else "columns"), best(whole, density), None
    if structure == "row":
        index = best(flat.sum(1), density)
        return "rows", index if rows is None else rows[index], None
    if structure == "column" and rows is None:
        return "columns", best(flat.sum(0), density), None
    # columns of some of a fused projection's thirds are blocks a third high
    third = shape[0] // 3
    high, wide = (third, 1) if structure == "column" else size or fitting(shape)
    check_size(shape, high, wide)
    tiles = score.new_zeros(shape[0] // high, shape[1] // wide)
    whole = flat if rows is None else score.new_zeros(shape[:2]).index_copy(0, rows, flat)
    tiles += whole.view(tiles.shape[0], high, tiles.shape[1], wide).sum((1, 3))
    candidates = tiles.flatten() if rows is None else tiles[(rows[::high] // high).unique()].flatten()
    index = best(candidates, density)
    if rows is not None:
        index = (rows[::high] // high).unique()[index // tiles.shape[1]] * tiles.shape[1] + index % tiles.shape[1]
    return "blocks", torch.stack([index // tiles.shape[1], index % tiles.shape[1]]), (high, wide)


def best(score: Tensor, density: float) -> Tensor:
    """The places of the largest scores of a vector, ascending; a share `density` of it, at least one."""
    count = max(round(density * score.numel()), 1)
    return score.topk(count, sorted=False).indices.sort().values


def best_of_groups(score: Tensor, n: int, m: int) -> Tensor:
    """The flat places of the `n` best in each `m` neighbours of a row, ascending; the last group may be shorter."""
    width = score.shape[1]
    padded = nn.functional.pad(score, (0, -width % m), value=-torch.inf).unflatten(1, (-1, m))
    inside = padded.topk(n, -1).indices + torch.arange(0, padded.shape[1] * m, m, device=score.device)[:, None]
    flat = inside.flatten(1)
    places = torch.arange(len(score), device=score.device)[:, None] * width + flat
    return places[flat < width].sort().values


def places(index: Tensor, shape: torch.Size, rows: Tensor | None) -> Tensor:
    """Flat places in a whole weight, of places in the part of it that its `rows` are."""
    if rows is None:
        return index
    width = math.prod(shape[1:])
    return rows[index // width] * width + index % width


def fitting(shape: torch.Size) -> tuple[int, int]:
    """A block of up to 16 outputs by 16 inputs that divides the weight."""
    return tuple(next(n for n in range(16, 0, -1) if length % n == 0) for length in shape[:2])


def check_size(shape: torch.Size, high: int, wide: int) -> None:
    if shape[0] % high or shape[1] % wide:
        raise ValueError(
            f"block_size ({high}, {wide}) does not divide a weight of {tuple(shape)}; {fitting(shape)} does"
        )


@torch.no_grad()
def input_norms(model: nn.Module, layers: list[Layer], sample) -> dict[str, Tensor]:
    """The norm of each input of each layer, (C,), over one forward pass of `model` on `sample`.

    Times |W| this is Wanda's score (Sun et al. 2023, arXiv 2306.11695). For convolutions: of each input channel.
    """
    sums, hooks = {}, []

    def hook_for(layer):
        def hook(module, args):
            x = args[0].detach().float()
            if isinstance(module, nn.Conv1d | nn.Conv2d):
                square = x.square().sum([d for d in range(x.dim()) if d != 1])
                square = square.view(layer.groups, -1).sum(0)
            elif isinstance(module, nn.Embedding):
                return
            else:
                square = x.square().flatten(0, -2).sum(0)
            sums[layer.name] = sums.get(layer.name, 0) + square

        return hook

    was = model.training
    model.eval()
    try:
        hooks = [layer.module.register_forward_pre_hook(hook_for(layer)) for layer in layers]
        model(**sample) if isinstance(sample, dict) else model(*sample if isinstance(sample, tuple) else (sample,))
    finally:
        model.train(was)
        for hook in hooks:
            hook.remove()
    return {name: square.sqrt() for name, square in sums.items()}


def each_gradient(layers: list[Layer], loss: Callable[[], Tensor], visit: Callable[[Layer, Tensor], None]) -> None:
    """Calls `visit(layer, gradient of its weight)` for one after the other, and frees each before the next.

    loss: computes the loss of a batch with `model`, a scalar with its graph.
    """
    weights = {layer.name: mixin_for(layer.module).parameter(layer.module) for layer in layers}
    flags = {name: weight.requires_grad for name, weight in weights.items()}
    kept = {name: weight.grad for name, weight in weights.items()}
    hooks = []

    def hook_for(layer):
        def hook(weight):
            gradient, weight.grad = weight.grad, None
            visit(layer, mixin_for(layer.module).outputs_first(gradient))

        return hook

    try:
        for layer in layers:
            weight = weights[layer.name]
            weight.grad = None
            weight.requires_grad_(True)
            hooks.append(weight.register_post_accumulate_grad_hook(hook_for(layer)))
        loss().backward()
    finally:
        for hook in hooks:
            hook.remove()
        for name, weight in weights.items():
            weight.requires_grad_(flags[name])
            weight.grad = kept[name]
