"""Sparse memory fine-tuning: each batch trains those slots of a memory that it reads more than other texts do.

Lin et al. 2025, "Continual Learning via Sparse Memory Finetuning" (arXiv 2510.15103), section 3: slots are ranked as
TF-IDF ranks words, and the `top_t` first may move. What was learned before is in other slots, so little is forgotten.
Ranking by the Kullback-Leibler divergence: Goyal et al. 2026 (arXiv 2604.05248). Only slots that were ever chosen have
a trained row; the table (S, V) itself has neither a copy nor a gradient.

Shapes: table (S, V), reads of a batch (B, ..., K), a trained row for each of R slots, delta (R, V).
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lean_arch.adapters.method import Method
from lean_arch.adapters.part import Part, value_dtype
from lean_arch.adapters.targets import compiled
from lean_arch.blocks import MemoryLayer
from lean_arch.blocks.sizes import check_whole
from lean_arch.ops import memory_lookup
from lean_arch.ops.memory_lookup.op import places
from lean_arch.ops.subclass import Mixin, become, revert
from lean_arch.registry import ADAPTERS


@dataclasses.dataclass
class SlotCounts:
    """How a memory was read. documents (S,): in how many of `total` documents each slot; reads (S,): how often."""

    documents: Tensor
    reads: Tensor
    total: int = 0


def memory_layers(model: nn.Module, target: str = ".*") -> dict[str, MemoryLayer]:
    """Those whose whole name matches `target`, a regular expression. Raises ValueError where there are none."""
    pattern, found = compiled(target), dict(model.named_modules())
    found = {name: module for name, module in found.items() if isinstance(module, MemoryLayer)}
    wanted = {name: module for name, module in found.items() if pattern.fullmatch(name)}
    if not wanted:
        there = f"there are {', '.join(found)}" if found else "this model has none; insert_memory puts some in"
        raise ValueError(f"target {target!r} matches no memory layer; {there}")
    return wanted


@torch.no_grad()
def count_slots(
    model: nn.Module, batches: Iterable, call: Callable | None = None, target: str = ".*"
) -> dict[str, SlotCounts]:
    """Runs `model` on `batches`, in eval mode, and counts what its memory layers read: the background of a ranking.

    A document is a sample, the first dimension of a layer's input (where it has one alone, a token).

    Args:
        batches: of text as the model saw it before it is fine-tuned.
        call: what to do with a batch; by default `model(batch)`.
        target: as for `memory_layers`.
    """
    layers, counts, was_training = memory_layers(model, target), {}, model.training
    for name, layer in layers.items():
        zeros = torch.zeros(len(layer.values), dtype=torch.int64, device=layer.values.device)
        counts[name] = SlotCounts(zeros, zeros.clone())

    def hear(name: str, layer: MemoryLayer):
        def recall(index: Tensor, weights: Tensor) -> Tensor:
            add_reads(counts[name], index)
            return type(layer).recall(layer, index, weights)

        return recall

    model.eval()
    try:
        for name, layer in layers.items():
            layer.recall = hear(name, layer)
        for batch in batches:
            (call or model)(batch)
    finally:
        for layer in layers.values():
            del layer.recall
        model.train(was_training)
    return counts


def add_reads(counts: SlotCounts, index: Tensor) -> None:
    """index (B, ..., K): the slots that B documents read."""
    slots, index = len(counts.documents), index.flatten(1)
    document = torch.arange(len(index), device=index.device)[:, None]
    once = (index + document * slots).unique() % slots
    counts.documents += torch.bincount(once, minlength=slots)
    counts.reads += torch.bincount(index.flatten(), minlength=slots)
    counts.total += len(index)


def by_tf_idf(share: Tensor, counts: SlotCounts, slots: Tensor) -> Tensor:
    """Times log of (documents + 1) / (documents that read the slot + 1)."""
    return share * ((counts.total + 1) / (counts.documents[slots] + 1)).log()


def by_lift(share: Tensor, counts: SlotCounts, slots: Tensor) -> Tensor:
    """Over their share of the background's reads, to which one of each slot is added."""
    return share / (counts.reads[slots] + 1) * (counts.reads.sum() + len(counts.reads))


def by_kl(share: Tensor, counts: SlotCounts, slots: Tensor) -> Tensor:
    """What the slots add to the divergence of the batch's reads from the background's."""
    return share * by_lift(share, counts, slots).log()


RANKINGS = {"tf_idf": by_tf_idf, "kl": by_kl, "lift": by_lift}  # of the share that `slots` have in a batch's reads


class MemoryPart(Part):
    """Rows (R,): the slots that have a trained row, -1 where there is room for more; delta (R, V): what they add."""

    def __init__(self, delta: Tensor, counts: SlotCounts, top_t: int, ranking: str):
        super().__init__()
        self.delta, self.top_t, self.ranking = nn.Parameter(delta), top_t, ranking
        self.total = counts.total
        self.register_buffer("rows", torch.full((len(delta),), -1, device=delta.device))
        self.register_buffer("documents", counts.documents)
        self.register_buffer("reads", counts.reads)

    def recalled(self, index: Tensor, weights: Tensor) -> Tensor:
        """What the trained rows add to the sum that (T, K) reads of the table make: (T, V).

        In training the batch's own choice of slots alone gets a gradient, and new ones among them a row.
        """
        if not (self.training and torch.is_grad_enabled()):
            return memory_lookup(self.delta, places(index, self.rows), weights, sparse=False)
        chosen = self.choose(index)
        self.make_room(chosen)
        place = places(index, self.rows)
        moves = torch.zeros(len(self.rows) + 1, dtype=torch.bool, device=index.device)
        moves[places(chosen, self.rows)] = True
        moves[-1] = False  # where -1, no row, is found
        moving, resting = torch.where(moves[place], place, -1), torch.where(moves[place], -1, place)
        out = memory_lookup(self.delta, moving, weights, sparse=False)
        return out + memory_lookup(self.delta.detach(), resting, weights)

    def choose(self, index: Tensor) -> Tensor:
        """The `top_t` slots of a batch that are read there above all, of those with a score above 0."""
        slots, reads = index.unique(return_counts=True)
        scores = RANKINGS[self.ranking](reads / reads.sum(), self.counts, slots)
        best = scores.topk(min(self.top_t, len(slots)))
        return slots[best.indices[best.values > 0]]

    @property
    def counts(self) -> SlotCounts:
        return SlotCounts(self.documents, self.reads, self.total)

    def make_room(self, chosen: Tensor) -> None:
        """Gives the slots that have no row one of those that are left, the first the best."""
        new = chosen[places(chosen, self.rows) < 0]
        free = (self.rows < 0).nonzero()[:, 0]
        if len(new) > len(free):
            warnings.warn(
                f"all {len(self.rows)} rows of a memory adapter are taken, so no more slots are trained; attach it "
                "with a larger capacity, or a smaller top_t",
                stacklevel=2,
            )
        count = min(len(new), len(free))
        self.rows[free[:count]] = new[:count]

    def changes(self, weight, groups):
        taken = self.rows >= 0
        columns = torch.arange(weight.shape[1], device=weight.device)
        positions = self.rows[taken, None] * weight.shape[1] + columns
        yield positions.flatten(), self.scaled(self.delta[taken]).flatten()

    def facts(self):
        return {"total": self.total}


class AdaptedMemory(Mixin):
    """A MemoryLayer to whose sums adapters add."""

    def recall(self, index, weights):
        out = super().recall(index, weights)
        for part in self.adapters.values():
            if part.acts:
                more = part.recalled(index.flatten(0, -2), weights.flatten(0, -2))
                out = out + part.scaled(more).view(out.shape).to(out.dtype)
        return out


@ADAPTERS.register("memory")
class Memory(Method):
    """Trains slots of memory layers that new texts read and others do not.

    Args:
        background: of `count_slots`, for texts whose knowledge is to stay.
        top_t: slots that a batch may move, in each layer.
        capacity: slots in each layer that may ever move: a trained row each.
        ranking: "tf_idf" as in the paper; "kl", the Kullback-Leibler divergence; "lift", how many times more a batch
            reads a slot than the background does, which prefers slots that the background hardly reads to those that
            the batch reads often.

    Of optimisers those without momentum leave a row alone that a batch does not move: `RowAdam`, or SGD as in the
    paper.
    """

    target = ".*"

    def __init__(
        self,
        background: dict[str, SlotCounts] | None = None,
        top_t: int = 500,
        capacity: int = 8192,
        ranking: str = "tf_idf",
    ):
        super().__init__()
        check_whole(1, top_t=top_t, capacity=capacity)
        if ranking not in RANKINGS:
            raise ValueError(f"ranking {ranking!r} does not exist; {', '.join(RANKINGS)} do")
        self.background, self.top_t, self.capacity, self.ranking = background, top_t, capacity, ranking

    def attach(self, model, name, target, qkv):
        found = memory_layers(model, target or self.target)
        counts = self.background or {}
        for path, layer in found.items():
            if path not in counts or len(counts[path].documents) != len(layer.values):
                raise ValueError(
                    f"background has no counts of the {len(layer.values)} slots of memory layer {path!r}; "
                    "adapters.count_slots(model, batches) makes some"
                )
        self.enter(name, {layer: self.part(layer, counts[path]) for path, layer in found.items()})

    def part(self, layer: MemoryLayer, counts: SlotCounts) -> MemoryPart:
        values = layer.values
        rows = min(self.capacity, len(values))
        delta = torch.zeros(rows, values.shape[1], dtype=value_dtype(values), device=values.device)
        return MemoryPart(delta, counts, self.top_t, self.ranking)

    def rebuild(self, model, name, saved):
        layers, found = memory_layers(model), {}
        for path, (state, facts) in saved.items():
            if path not in layers:
                raise ValueError(f"this model has no memory layer {path!r}")
            counts = SlotCounts(torch.empty_like(state["documents"]), torch.empty_like(state["reads"]), facts["total"])
            part = MemoryPart(torch.empty_like(state["delta"]), counts, self.top_t, self.ranking)
            if len(counts.reads) != len(layers[path].values):
                raise ValueError(f"memory layer {path!r} has {len(layers[path].values)} slots, not {len(counts.reads)}")
            part.load_state_dict(state)
            found[layers[path]] = part.to(layers[path].values.device)
        self.enter(name, found)

    @staticmethod
    def enter(name: str, found: dict[MemoryLayer, MemoryPart]) -> None:
        for layer, part in found.items():
            part.train(layer.training)
            if "adapters" not in layer._modules:
                become(layer, AdaptedMemory)
                layer.adapters = nn.ModuleDict()
            layer.adapters[name] = part

    def detach(self, model, name):
        for _, layer, _ in list(self.parts(model, name)):
            del layer.adapters[name]
            if not layer.adapters:
                del layer.adapters
                revert(layer, AdaptedMemory)

    def check_merge(self, model, name, force):
        """A table of values can hold any change to it."""

    def facts(self):
        return {"top_t": self.top_t, "capacity": self.capacity, "ranking": self.ranking}
