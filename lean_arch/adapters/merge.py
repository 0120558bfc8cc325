"""Writing an adapter into the weights it changes, and taking it out again to the bit."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lean_arch.adapters.layers import matrix
from lean_arch.adapters.method import LayerMethod, attached, method_of


@torch.no_grad()
def merge(model: nn.Module, name: str, *, force: bool = False) -> nn.Module:
    """Writes the adapter `name` into the weights it changes: the same outputs to rounding, at the base's own cost.

    Kept for `unmerge` are the entries that were overwritten, of weights changed everywhere all.

    Raises ValueError, and changes nothing, when it is merged already, when its method adds what no weight can hold, and
    for a quantised weight, whose rounding loses most of a small change, unless `force`.
    """
    method, there = method_of(model, name), attached(model)
    if any(merged == name for merged, _ in there.merged):
        raise ValueError(f"name {name!r} is merged already; unmerge it first")
    method.check_merge(model, name, force)
    kept = []
    for _, layer, part in method.parts(model, name):
        weight = matrix(layer)
        for positions, values in part.changes(weight, getattr(layer, "groups", 1)):
            kept.append((layer, positions, write(weight, positions, values)))
        part.merged = True
    there.merged.append((name, kept))
    return model


def write(weight: Tensor, positions: Tensor | None, values: Tensor) -> Tensor:
    """Adds `values` to the entries of `weight` at the flat `positions` (None: to all). Returns what they were."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    if positions is None:
        before = weight.clone()
        weight.copy_((weight.to(wide) + values.view(weight.shape).to(wide)).to(weight.dtype))
        return before
    before = weight.take(positions)
    weight.put_(positions, (before.to(wide) + values.to(wide)).to(weight.dtype))
    return before


@torch.no_grad()
def unmerge(model: nn.Module, name: str) -> nn.Module:
    """Gives the weights back as they were before `merge`, bit for bit. Raises ValueError when it is not merged."""
    method_of(model, name)
    there = attached(model)
    names = [merged for merged, _ in there.merged]
    if name not in names:
        raise ValueError(f"name {name!r} is not merged; merged are {', '.join(map(repr, names)) or 'none'}")
    later = names[names.index(name) + 1 :]
    while there.merged:  # what was merged later may have changed the same entries
        last, kept = there.merged.pop()
        for layer, positions, before in reversed(kept):
            weight = matrix(layer)
            weight.copy_(before) if positions is None else weight.put_(positions, before)
        for _, _, part in there.methods[last].parts(model, last):
            part.merged = False
        if last == name:
            break
    for other in later:
        merge(model, other, force=True)
    return model


@contextlib.contextmanager
def all_merged(model: nn.Module) -> Iterator[None]:
    """Within, the layers' weights are what they compute with, so that gradients of them can be taken."""
    there = attached(model)
    merged = {name for name, _ in there.merged}
    names = [n for n, method in there.methods.items() if isinstance(method, LayerMethod) and n not in merged]
    done = []
    try:
        for name in names:
            merge(model, name, force=True)
            done.append(name)
        yield
    finally:
        for name in reversed(done):
            unmerge(model, name)
