"""Memory layers for a model that was trained without: beside its feed-forward layers, or in their place.

Shapes: x (..., C) in and out of a feed-forward layer.
"""

from torch import Tensor, nn

from lean_arch.adapters.targets import compiled
from lean_arch.blocks import MemoryLayer


class WithMemory(nn.Module):
    """A layer to whose output a memory of its input is added: `layer(x) + memory(x)`."""

    def __init__(self, layer: nn.Module, memory: MemoryLayer):
        super().__init__()
        self.layer, self.memory = layer, memory

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        return self.layer(x) + self.memory(x)


def insert_memory(model: nn.Module, target: str, num_keys: int, *, replace: bool = False, **options) -> nn.Module:
    """Gives layers of `model` a MemoryLayer, in place. Returns `model`.

    Beside a layer the memory adds nothing at first, so outputs stay the same; in its place it is to be trained.

    Args:
        target: a regular expression that the whole name of a layer matches, which maps (..., C) to (..., C).
        num_keys: keys of each half; a memory has num_keys^2 slots.
        replace: take the layer out.
        options: of MemoryLayer.

    Raises ValueError, and leaves `model` unchanged, where `target` matches no layer or one whose width is not known.
    """
    pattern = compiled(target)
    found = {name: layer for name, layer in model.named_modules() if name and pattern.fullmatch(name)}
    if not found:
        raise ValueError(f"target {target!r} matches no layer of this model; '.*mlp' is for those called mlp")
    new = {name: made(name, layer, num_keys, replace, options) for name, layer in found.items()}
    for name, module in new.items():
        model.set_submodule(name, module)
    return model


def made(name: str, layer: nn.Module, num_keys: int, replace: bool, options: dict) -> nn.Module:
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    if not linears or linears[0].in_features != linears[-1].out_features:
        raise ValueError(f"target matches {name!r}, which is no feed-forward layer of linear layers from C to C")
    first = linears[0].weight
    memory = (
        MemoryLayer(linears[0].in_features, num_keys, **options).to(first.device, first.dtype).train(layer.training)
    )
    if replace:
        return memory
    nn.init.zeros_(memory.proj.weight)
    return WithMemory(layer, memory)
