"""Sparse fine-tuning: a small part of each weight is trained, the rest never moves.

Sung et al. 2021, "Training Neural Networks with Fixed Sparse Masks" (arXiv 2111.09839); Bhardwaj et al. 2024, "Sparse
High Rank Adapters" (arXiv 2406.13175). There a mask is laid on dense gradients; here a trained weight has one value,
one gradient and one optimizer state, and the weight itself is only read.

Shapes: weight (O, C) or (O, C, *kernel), C inputs a group; values as `lean_arch.ops.sparse_linear` has them.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lean_arch.adapters.lora import LoRA, LoRAPart
from lean_arch.adapters.merge import all_merged
from lean_arch.adapters.method import LayerMethod
from lean_arch.adapters.part import Part, dense, value_dtype
from lean_arch.adapters.selection import SELECTIONS, check_structure, choose, each_gradient, input_norms
from lean_arch.adapters.targets import Layer
from lean_arch.ops.sparse_linear.structures import Blocks, Columns, Entries, Rows
from lean_arch.registry import ADAPTERS


class SparsePart(Part):
    """Trained values of a weight, and where they lie in it.

    Args:
        kind: "columns", "rows", "blocks" or "entries".
        index: numbers of columns or rows, flat places of entries (k,), or block rows and block columns (2, n).
        size: of a block, else None.
        values: as the structure has them.
        low_rank: a part that adds to the same layer besides.
    """

    def __init__(self, kind: str, index: Tensor, size, values: Tensor, low_rank: LoRAPart | None):
        super().__init__()
        self.kind, self.size = kind, size
        self.values = nn.Parameter(values)
        self.register_buffer("index", index)
        self.low_rank = low_rank

    @property
    def structure(self):
        return structure(self.kind, self.index, self.size)

    def facts(self):
        return {"kind": self.kind, "size": self.size}

    def updates(self):
        return [(self.scaled(self.values), self.structure)]

    def added(self, x, layer):
        if self.low_rank is None:
            return None
        self.low_rank.strength = self.strength
        return self.low_rank.added(x, layer)

    def changes(self, weight, groups):
        yield from super().changes(weight, groups)
        if self.low_rank is not None:
            self.low_rank.strength = self.strength
            yield from self.low_rank.changes(weight, groups)


def structure(kind: str, index: Tensor, size: tuple[int, int] | None):
    if kind == "blocks":
        return Blocks(*index, size)
    return {"columns": Columns, "rows": Rows, "entries": Entries}[kind](index)


@ADAPTERS.register("sparse")
class Sparse(LayerMethod):
    """Trains a share of each layer's weight, chosen once, by compact gradients.

    Args:
        density: share of each weight that is trained, above 0 and at most 1; at least one column (row, ...) is.
        structure: "column": whole inputs, of which alone the backward pass keeps the activations; "row": whole outputs;
            "block"; "n:m" (or "2:4", ...): n in each m neighbours; "unstructured": anywhere.
        select: what counts: "magnitude" |W|; "activation" |W| |x|, over one forward pass of `sample`; "gradient"
            |dL/dW|, of `loss`, a layer at a time; "random", by `seed`.
        sample: input of the model for select="activation": a tensor, a tuple of arguments or a dict of keywords.
        loss: for select="gradient": a function without arguments that computes the loss of a batch with the model.
        block_size: (outputs, inputs) of a block; default: up to 16 by 16, what divides the weight.
        seed: for select="random".
        rank: of a low-rank part beside the sparse one (`adapters.lora`); 0: none.

    Raises ValueError for values that are not of these.
    """

    def __init__(
        self,
        density: float = 0.01,
        structure: str = "column",
        select: str = "magnitude",
        sample=None,
        loss: Callable[[], Tensor] | None = None,
        block_size: tuple[int, int] | None = None,
        seed: int = 0,
        rank: int = 0,
    ):
        super().__init__()
        if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
            raise ValueError(f"density {density!r} must be a share above 0 and at most 1, as 0.01")
        check_structure(structure)
        if select not in SELECTIONS:
            raise ValueError(f"select {select!r} does not exist; {', '.join(SELECTIONS)} do")
        for needed, value, needing in (("sample", sample, "activation"), ("loss", loss, "gradient")):
            if (value is not None) != (select == needing):
                word = "needs" if value is None else "goes only with"
                said = (
                    f"select={needing!r} {word} {needed}=" if value is None else f"{needed} {word} select={needing!r}"
                )
                raise ValueError(f"{said}, a {'batch of inputs' if needed == 'sample' else 'function of no arguments'}")
        self.density, self.structure, self.select, self.block_size = density, structure, select, block_size
        self.seed, self.rank, self.sample, self.loss = seed, rank, sample, loss
        self.low_rank = LoRA(rank, seed=seed) if rank else None

    def prepare(self, model, layers):
        self.chosen = {}
        if self.select == "gradient":

            def visit(layer, gradient):
                self.chosen[layer.name] = self.choose(layer, gradient.float().abs())

            with all_merged(model):
                each_gradient(layers, self.loss, visit)
            missing = [layer.name for layer in layers if layer.name not in self.chosen]
            if missing:
                raise ValueError(f"loss does not depend on layer {missing[0]!r}; leave that out of target")
            return
        norms = input_norms(model, layers, self.sample) if self.select == "activation" else {}
        generator = torch.Generator().manual_seed(self.seed)
        for layer in layers:
            if self.select == "random":
                score = torch.rand(layer.weight.shape, generator=generator).to(layer.weight.device)
            else:
                score = dense(layer.weight).float().abs()
            if layer.name in norms:
                score *= norms[layer.name].view(-1, *[1] * (score.dim() - 2))
            self.chosen[layer.name] = self.choose(layer, score)

    def choose(self, layer: Layer, score: Tensor):
        return choose(score, layer, self.structure, self.density, self.block_size)

    def part(self, layer):
        kind, index, size = self.chosen.pop(layer.name)
        shape = structure(kind, index, size).values_shape(layer.weight.shape, layer.groups)
        values = torch.zeros(shape, dtype=value_dtype(layer.weight), device=layer.weight.device)
        takes_rank = self.low_rank and layer.groups == 1 and layer.weight.dim() > 1
        return SparsePart(kind, index, size, values, self.low_rank.part(layer) if takes_rank else None)

    def blank(self, layer, state, facts):
        low_rank = self.low_rank.blank(layer, inner(state, "low_rank."), {}) if self.low_rank else None
        size = facts["size"] and tuple(facts["size"])
        structure(facts["kind"], state["index"], size).check(layer.weight.shape, layer.groups)
        return SparsePart(facts["kind"], state["index"], size, torch.empty_like(state["values"]), low_rank)

    def facts(self):
        names = "density", "structure", "seed", "rank"
        return {name: getattr(self, name) for name in names}


def inner(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
