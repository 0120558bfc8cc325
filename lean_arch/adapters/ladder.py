"""Ladder side-tuning: a narrow network beside the base reads its blocks, and no backward pass goes through them.

Sung et al. 2022, "LST: Ladder Side-Tuning for Parameter and Memory Efficient Transfer Learning" (arXiv 2206.06522).
The base is frozen, so autograd records nothing in it by itself. What the side network makes of the blocks' outputs is
added to the last of them, and only the rest of the model behind it (norm, pooling, head) is differentiated.

Shapes: a block's output (B, ..., C) or (B, C, H, W), C its width; the side network's state h is C / reduction wide.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_arch.adapters.method import Method
from lean_arch.adapters.part import Part
from lean_arch.memory.units import find_blocks
from lean_arch.ops.subclass import Mixin, become, revert
from lean_arch.registry import ADAPTERS


class Rung(nn.Module):
    """Joins a block's output to the state: h = mu down(tap) + (1 - mu) h, then h + mlp(norm(h)); mu is learned."""

    def __init__(self, width: int, side: int, before: int | None):
        super().__init__()
        self.down = nn.Linear(width, side)
        self.carry = nn.Linear(before, side, bias=False) if before not in (None, side) else nn.Identity()
        self.gate = None if before is None else nn.Parameter(torch.zeros(()))
        self.norm = nn.LayerNorm(side)
        self.mlp = nn.Sequential(nn.Linear(side, side), nn.GELU(), nn.Linear(side, side))

    def forward(self, tap: Tensor, h: Tensor | None) -> Tensor:
        """tap (B, ..., C), h (B, ..., side of the rung before) -> (B, ..., side)."""
        new = self.down(tap)
        if h is not None:
            new = torch.lerp(pooled(self.carry(h), new.shape), new, self.gate.sigmoid())
        return new + self.mlp(self.norm(new))


def pooled(h: Tensor, shape: torch.Size) -> Tensor:
    """h (B, ..., side) at the places of (B, ..., side) `shape`: means over neighbours."""
    places = shape[1:-1]
    if h.shape[1:-1] == places:
        return h
    if h.dim() == len(shape) == 4:
        return F.adaptive_avg_pool2d(h.movedim(-1, 1), places).movedim(1, -1)
    rows = F.adaptive_avg_pool1d(h.flatten(1, -2).mT, math.prod(places))
    return rows.mT.reshape(h.shape[0], *places, h.shape[-1])


class SideNetwork(Part):
    """The rungs of a ladder.

    Args:
        paths: of the blocks that have a rung, in the order they run.
        widths: of their outputs.
        firsts: whether the channels of each output come first, (B, C, H, W).
        reduction: how many times narrower the state is.
    """

    def __init__(self, paths: list[str], widths: list[int], firsts: list[bool], reduction: int):
        super().__init__()
        self.paths, self.widths, self.firsts, self.reduction = paths, widths, firsts, reduction
        sides = [max(width // reduction, 1) for width in widths]
        self.rungs = nn.ModuleList(map(Rung, widths, sides, [None, *sides]))
        self.up = nn.Linear(sides[-1], widths[-1])
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)
        self.reached = None  # within a forward pass: the number of the last rung, and h

    def __getstate__(self):
        return {**self.__dict__, "reached": None}

    def facts(self):
        return {name: getattr(self, name) for name in ("paths", "widths", "firsts", "reduction")}

    def climb(self, number: int, out: Tensor) -> Tensor:
        """Reads the output of block `number`. Returns what the model goes on with."""
        h = None
        if number:
            before, h = self.reached or (None, None)
            if before != number - 1:
                raise RuntimeError(f"rung {number} of the ladder was reached without rung {number - 1}")
        tap = out.detach()
        h = self.rungs[number](tap.movedim(1, -1) if self.firsts[number] else tap, h)
        self.reached = (number, h)
        if number + 1 < len(self.rungs):
            return out
        self.reached = None
        added = self.scaled(self.up(h)).to(out.dtype)
        return out + (added.movedim(-1, 1) if self.firsts[number] else added)


class Tapped(Mixin):
    """A block whose output ladders read; `ladders` holds (side network, number of the rung) by adapter name."""

    reversible = True  # it keeps nothing for the backward pass, so checkpointing leaves it alone

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        for side, number in self.ladders.values():
            if side.acts:
                first = side.climb(number, first)
        return (first, *out[1:]) if isinstance(out, tuple) else first


@ADAPTERS.register("ladder")
class Ladder(Method):
    """A side network that reads the model's repeated blocks (`lean_arch.memory.units`).

    Args:
        reduction: how many times narrower than the blocks' outputs it is.
        every: a rung for each so many blocks, the last among them. Of ViT-B/16, batch 8, float32, a training step takes
            146 MB with 1, 100 with 2, 83 with 3 (with LoRA of rank 8 in all layers 977).
        sample: an input of the model, to find the blocks' order and widths: a tensor, a tuple of arguments or a dict of
            keywords. Default: what models of timm and transformers say that they take.
        seed: of the first values.
    """

    def __init__(self, reduction: int = 8, every: int = 2, sample=None, seed: int = 0):
        super().__init__()
        for name, value in (("reduction", reduction), ("every", every)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r} must be a whole number, 1 or more")
        self.reduction, self.every, self.sample, self.seed = reduction, every, sample, seed

    def attach(self, model, name, target, qkv):
        if target is not None:
            raise ValueError(f"target {target!r} means nothing to adapter 'ladder', which reads blocks; leave it out")
        found = outputs_of(model, candidates(model), self.sample)
        found = found[(len(found) - 1) % self.every :: self.every]
        firsts = [channels_first(module, out) for module, out in found]
        widths = [out.shape[1] if first else out.shape[-1] for first, (_, out) in zip(firsts, found)]
        path_of = {module: path for path, module in model.named_modules()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            side = SideNetwork([path_of[module] for module, _ in found], widths, firsts, self.reduction)
        self.enter(model, name, side.to(found[0][1].device, found[0][1].dtype))

    def enter(self, model: nn.Module, name: str, side: SideNetwork) -> None:
        try:
            modules = [model.get_submodule(path) for path in side.paths]
        except AttributeError as error:
            raise ValueError(f"this model has not the blocks that the ladder reads: {error}") from error
        if not isinstance(getattr(model, "adapters", nn.ModuleDict()), nn.ModuleDict):
            raise ValueError("the model has an attribute 'adapters' of its own, which a ladder would hide; rename that")
        if not hasattr(model, "adapters"):
            model.adapters = nn.ModuleDict()
        model.adapters[name] = side.train(model.training)
        for number, module in enumerate(modules):
            if not isinstance(module, Tapped):
                become(module, Tapped)
                module.ladders = {}
            module.ladders[name] = side, number

    def detach(self, model, name):
        for module in model.modules():
            if isinstance(module, Tapped):
                module.ladders.pop(name, None)
                if not module.ladders:
                    del module.ladders
                    revert(module, Tapped)
        if name in getattr(model, "adapters", ()):
            del model.adapters[name]
            if not model.adapters:
                del model.adapters

    def rebuild(self, model, name, saved):
        ((state, facts),) = saved.values()
        side = SideNetwork(**facts).to(state["up.bias"].dtype)
        side.load_state_dict(state)
        self.enter(model, name, side.to(next(model.parameters()).device))

    def facts(self):
        return {"reduction": self.reduction, "every": self.every, "seed": self.seed}


def candidates(model: nn.Module) -> list[nn.Module]:
    tapped = [module for module in model.modules() if isinstance(module, Tapped)]
    blocks = tapped or [block.modules[-1] for block in find_blocks(model) if block.counted]
    if not blocks:
        raise ValueError("the model has no blocks that a ladder could read; 'sparse' and 'lora' adapt single layers")
    return blocks


@torch.no_grad()
def outputs_of(model: nn.Module, blocks: list[nn.Module], sample) -> list[tuple[nn.Module, Tensor]]:
    """Those of `blocks` that run, in the order they do, with their outputs for the sample."""
    found = []

    def hook(module, args, out):
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor) and first.dim() > 2 and first.is_floating_point():
            found.append((module, first))

    args, kwargs = arguments(model, sample)
    hooks, modes = [block.register_forward_hook(hook) for block in blocks], [(m, m.training) for m in model.modules()]
    try:
        model.eval()(*args, **kwargs)
    finally:
        for handle in hooks:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    if not found or len({module for module, _ in found}) < len(found):
        what = "run more than once in a forward pass" if found else "give no maps or sequences"
        raise ValueError(f"the model's blocks {what}, so a ladder cannot read them; 'sparse' and 'lora' work")
    return found


def arguments(model: nn.Module, sample) -> tuple[tuple, dict]:
    """What to call the model with."""
    if sample is None:
        sample = usual_sample(model)
    if isinstance(sample, dict):
        return (), sample
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def usual_sample(model: nn.Module):
    like = next(model.parameters())
    size = getattr(model, "pretrained_cfg", {}).get("input_size")
    if size is not None:  # timm's; a model may have been made for another image size than its weights
        side = getattr(getattr(model, "patch_embed", None), "img_size", None) or size[1:]
        return torch.zeros(1, size[0], *side, device=like.device, dtype=like.dtype)
    if isinstance(inputs := getattr(model, "dummy_inputs", None), dict):  # transformers'
        return {name: value.to(like.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    raise ValueError("adapter 'ladder' needs sample=, an input of the model, to find the order and width of its blocks")


def channels_first(module: nn.Module, out: Tensor) -> bool:
    """Whether the module's parameters fit dimension 1 of its output better than the last one."""
    sizes = [size for parameter in module.parameters() for size in parameter.shape[:2]]
    return sizes.count(out.shape[1]) > sizes.count(out.shape[-1])
