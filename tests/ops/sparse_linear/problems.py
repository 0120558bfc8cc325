"""Layers with updates to test, and the same with the update written into a dense float64 weight."""

import dataclasses

import torch
import torch.nn.functional as F

from lean_arch.ops.sparse_linear import (
    Blocks,
    Columns,
    Entries,
    Rows,
    sparse_conv1d,
    sparse_conv2d,
    sparse_embedding,
    sparse_linear,
)

TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def dense(values, structure, shape, groups=1):
    """The update as a weight, written down structure by structure."""
    full = values.new_zeros(shape)
    if isinstance(structure, Entries):
        return full.flatten().index_put((structure.index,), values).view(shape)
    if isinstance(structure, Blocks):
        bo, bi = structure.size
        for block, row, col in zip(values, structure.rows.tolist(), structure.cols.tolist()):
            full[row * bo : (row + 1) * bo, col * bi : (col + 1) * bi] = block
        return full
    if groups > 1:
        by_group = full.view(groups, shape[0] // groups, *shape[1:])
        return by_group.index_put((structure.index,), values.view(-1, *by_group.shape[1:])).view(shape)
    if isinstance(structure, Rows):
        return full.index_put((structure.index,), values)
    return full.transpose(0, 1).index_put((structure.index,), values.transpose(0, 1)).transpose(0, 1)


def structure_of(kind, shape, generator, groups=1, size=(2, 3)):
    """A random one, of about a quarter of the weight."""

    def some(limit, share=4):
        return torch.randperm(limit, generator=generator)[: max(limit // share, 1)]

    outputs, inputs = shape[:2]
    if kind == "entries":
        return Entries(some(torch.Size(shape).numel()).sort().values)
    if kind == "blocks":
        high, wide = outputs // size[0], inputs // size[1]
        index = some(high * wide)
        return Blocks(index // wide, index % wide, size)
    if groups > 1:
        return (Columns if kind == "columns" else Rows)(some(groups, 2))
    return Columns(some(inputs)) if kind == "columns" else Rows(some(outputs))


@dataclasses.dataclass
class Problem:
    """layer: its name; options: positional ones behind the updates."""

    layer: str
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    updates: list
    options: tuple = ()

    @property
    def groups(self):
        return self.options[3] if len(self.options) > 3 else 1

    @property
    def trained(self):
        tensors = self.x, self.bias, *(values for values, _ in self.updates)
        return [t for t in tensors if t is not None and t.requires_grad]

    def ours(self):
        if self.layer == "embedding":
            return sparse_embedding(self.x, self.weight, self.updates, *self.options)
        function = {"linear": sparse_linear, "conv1d": sparse_conv1d, "conv2d": sparse_conv2d}[self.layer]
        return function(self.x, self.weight, self.bias, self.updates, *self.options)

    def theirs(self):
        weight = self.weight + sum(dense(v, s, self.weight.shape, self.groups) for v, s in self.updates)
        if self.layer == "embedding":
            return F.embedding(self.x, weight, *self.options)
        return getattr(F, self.layer)(self.x, weight, self.bias, *self.options)

    def map(self, change):
        """The same with every float tensor changed by `change`, as new leaves, and indices where the values are."""

        def new(t):
            if t is None or not t.is_floating_point():
                return t
            return change(t.detach()).requires_grad_(t.requires_grad)

        updates = [(new(values), structure) for values, structure in self.updates]
        updates = [(values, structure.to(values.device)) for values, structure in updates]
        weight = new(self.weight)
        x = new(self.x).to(weight.device)
        return dataclasses.replace(self, x=x, weight=weight, bias=new(self.bias), updates=updates)


def problem(layer, kinds, *options, x=None, weight=None, dtype=torch.float32, seed=0, size=(2, 3), biased=True):
    """With random numbers; x and weight are shapes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "linear": ((3, 5, 13), (10, 13)),
        "conv1d": ((3, 6, 11), (8, 6, 3)),
        "conv2d": ((3, 6, 9, 8), (8, 6, 3, 3)),
        "embedding": ((4, 9), (12, 7)),
    }[layer]
    x_shape, weight_shape = x or sizes[0], weight or sizes[1]
    groups = options[3] if len(options) > 3 else 1

    def random(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    ids = torch.randint(weight_shape[0], x_shape, generator=generator)
    inputs = ids if layer == "embedding" else random(x_shape)
    updates = []
    for kind in kinds:
        structure = structure_of(kind, weight_shape, generator, groups, size)
        updates.append((random(structure.values_shape(weight_shape, groups)), structure))
    bias = random(weight_shape[:1]) if biased and layer != "embedding" else None
    return Problem(layer, inputs, random(weight_shape).detach(), bias, updates, options)


def error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def compare(problem, tolerance):
    """Value and every gradient, by a random upstream gradient, against the dense weight in float64."""
    exact = problem.map(torch.Tensor.double)
    ours, theirs = problem.ours(), exact.theirs()
    upstream = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(ours)
    got = torch.autograd.grad(ours, problem.trained, upstream)
    want = torch.autograd.grad(theirs, exact.trained, upstream.double())
    assert ours.shape == theirs.shape
    assert [g.dtype for g in got] == [t.dtype for t in problem.trained]
    for g, w in zip((ours, *got), (theirs, *want)):
        assert error(g, w) <= tolerance
    return ours
