"""Finds the repeated blocks of any model, from its module tree alone.

A matrix is a parameter of two or more dimensions. Children of one nn.Sequential, nn.ModuleList or nn.ModuleDict
are *repeated* when two or more are of the same class and hold two matrices each, as transformer blocks and
bottlenecks do; so are those of any other module, when it has no matrices besides (timm's RegNet stages). Modules
that hold repeated ones (stages, and stages of stages) are opened; the rest stay whole.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict


@dataclass(frozen=True)
class Block:
    """A module, or consecutive children of a Sequential: a layer with the norms, activations and pools behind it."""

    modules: tuple[nn.Module, ...]
    chain: nn.Sequential | None = None  # whose children they are, when its own forward calls them in order
    start: int = 0  # index of the first of them in the chain
    counted: bool = False  # one of the blocks that the model consists of; otherwise a stem, a head, a downsampling

    @property
    def stop(self) -> int:
        return self.start + len(self.modules)

    def follows(self, other: "Block") -> bool:
        return self.chain is not None and self.chain is other.chain and self.start == other.stop


def find_blocks(model: nn.Module) -> list[Block]:
    """Blocks of `model` in the order of its module tree; they do not overlap. Stacks that are reversible are left out.

    In a model without repeated modules all of them are counted.
    """
    blocks = list(_inside(model, set()))
    return blocks if any(b.counted for b in blocks) else [replace(b, counted=True) for b in blocks]


def _inside(module: nn.Module, seen: set[nn.Module]) -> Iterator[Block]:
    if is_reversible(module):
        return
    if _is_chain(module):
        yield from _along(module, seen)
        return
    repeated = _repeated(module)
    for child in module.children():
        if child in seen or is_reversible(child):
            continue
        seen.add(child)
        if _opens(child, repeated):
            yield from _inside(child, seen)
        elif _matrices(child) and any(True for _ in child.children()):
            listed = isinstance(module, CONTAINERS) and _matrices(child) >= 2
            yield Block((child,), counted=listed or child in repeated)


def _along(chain: nn.Sequential, seen: set[nn.Module]) -> Iterator[Block]:
    repeated = _repeated(chain)
    group, start = [], 0
    for index, child in enumerate([*chain, None]):
        ends = child is None or child in seen or is_reversible(child) or _opens(child, repeated)
        if group and (ends or (_matrices(child) and any(map(_matrices, group)))):
            yield Block(tuple(group), chain, start, counted=sum(map(_matrices, group)) >= 2)
            group = []
        if ends:
            if child is not None and child not in seen:
                seen.add(child)
                yield from _inside(child, seen)
            continue
        start = start if group else index
        group.append(child)
        seen.add(child)


def is_reversible(module: nn.Module) -> bool:
    return getattr(module, "reversible", False) is True


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _opens(child: nn.Module, repeated: set[nn.Module]) -> bool:
    """Whether to look for blocks inside `child`, whose repeated siblings (it may be one) are given."""
    if isinstance(child, nn.ModuleList | nn.ModuleDict):
        return True
    if any(is_reversible(m) or _repeated(m) for m in child.modules()):
        return True
    return _is_chain(child) and child not in repeated and len(child) > 1


def _repeated(module: nn.Module) -> set[nn.Module]:
    children = [child for child in module.children() if _matrices(child)]
    blocks = [child for child in children if _matrices(child) >= 2]
    number = Counter(map(type, blocks))
    if not isinstance(module, CONTAINERS) and (len(number) > 1 or len(blocks) < len(children)):
        return set()
    return {block for block in blocks if number[type(block)] >= 2}


def _matrices(module: nn.Module) -> int:
    return sum(p.dim() >= 2 for p in module.parameters())


def cut(blocks: list[Block], segments: int) -> list[list[Block]]:
    """Joins neighbouring blocks into `segments` segments as even in length as can be.

    Only blocks that follow each other in one Sequential can be joined, so there may come out more than asked for.
    """
    runs = []
    for block in blocks:
        if runs and block.follows(runs[-1][-1]):
            runs[-1].append(block)
        else:
            runs.append([block])
    pieces = [1] * len(runs)
    for _ in range(segments - len(runs)):
        longest = max(range(len(runs)), key=lambda i: len(runs[i]) / pieces[i])
        pieces[longest] += 1
    return [
        run[begin:end]
        for run, number in zip(runs, pieces, strict=True)
        for begin, end in itertools.pairwise(round(i * len(run) / number) for i in range(number + 1))
    ]
