"""What the ways of fine-tuning have in common. `@ADAPTERS.register("name")` on a subclass adds one."""

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn

from lean_arch.adapters.layers import add_part, matrix, mixin_for, remove_part
from lean_arch.adapters.part import Part, is_quantised
from lean_arch.adapters.targets import Layer, find_layers


class Method:
    """A way of fine-tuning; an object of it is one adapter of one model, and its options are constructor arguments.

    Attributes:
        target: which layers, where the user does not say.
        registered: the name that it is registered by.
        whole: parameters of the base that are trained themselves, by name, with copies of what they were.
    """

    target = "layers"
    registered: str

    def __init__(self):
        self.whole: dict[str, Tensor] = {}
        self.aside: dict[str, Tensor] | None = None  # the trained ones, while the adapter is switched off

    def attach(self, model: nn.Module, name: str, target: str | None, qkv: str) -> None:
        """Puts the trained values into `model`. Raises ValueError, and leaves `model` unchanged, where it cannot."""
        raise NotImplementedError

    def detach(self, model: nn.Module, name: str) -> None:
        """Takes them out."""
        raise NotImplementedError

    def parts(self, model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, Part]]:
        """(layer name, layer, part) of this adapter, in the order of the module tree."""
        for path, module in list(model.named_modules()):
            parts = module._modules.get("adapters")
            if isinstance(parts, nn.ModuleDict) and name in parts:
                yield path, module, parts[name]

    def check_merge(self, model: nn.Module, name: str, force: bool) -> None:
        """Raises ValueError where merging is not possible, or loses much and is not forced."""
        raise ValueError(f"name {name!r} is of a method that no weight of the base can hold, so it cannot be merged")

    def facts(self) -> dict:
        """The options, as JSON can hold them: with them an object is made again that `rebuild` can be called on."""
        raise NotImplementedError

    def rebuild(self, model: nn.Module, name: str, saved: dict[str, tuple[dict[str, Tensor], dict]]) -> None:
        """Puts saved parts into `model`: `saved` holds the state_dict and the facts of each by layer name.

        Raises ValueError, and leaves `model` unchanged, where it has no such layer or one of another shape.
        """
        raise NotImplementedError


class LayerMethod(Method):
    """A way of fine-tuning that adds a part to each of the layers it is for."""

    def attach(self, model, name, target, qkv):
        layers = self.find(model, target or self.target, qkv)
        self.prepare(model, layers)
        self.enter(name, [(layer, self.part(layer)) for layer in layers])

    def find(self, model: nn.Module, target: str, qkv: str) -> list[Layer]:
        return find_layers(model, target, qkv, frozenset(self.whole))

    def prepare(self, model: nn.Module, layers: list[Layer]) -> None:
        """Before any part is made: what must be found out from all layers together."""

    def part(self, layer: Layer) -> Part:
        """A new part for `layer`, on its device."""
        raise NotImplementedError

    def blank(self, layer: Layer, state: dict[str, Tensor], facts: dict) -> Part:
        """A part for `layer` into which `state` can be loaded; `facts` are those of the part that was saved."""
        raise NotImplementedError

    def detach(self, model, name):
        for _, layer, _ in list(self.parts(model, name)):
            remove_part(layer, name)

    def check_merge(self, model, name, force):
        users = {}
        for path, module in model.named_modules():
            for parameter in module._parameters.values():
                users.setdefault(parameter, []).append((path, module))
        for path, layer, _ in self.parts(model, name):
            for other, module in users[mixin_for(layer).parameter(layer)]:
                if name not in getattr(module, "adapters", ()):
                    raise ValueError(
                        f"name {name!r} changes the weight of layer {path!r}, which {other!r} shares without "
                        "being changed by it; merging would change both"
                    )
            if is_quantised(matrix(layer)) and not force:
                raise ValueError(
                    f"name {name!r} changes the quantised weight of layer {path!r}, which would round most of it away; "
                    "force=True merges all the same"
                )

    def rebuild(self, model, name, saved):
        layers = {layer.name: layer for layer in find_layers(model, ".*")}
        found = []
        for path, (state, facts) in saved.items():
            if path not in layers:
                raise ValueError(f"this model has no layer {path!r} that the adapter could change")
            part = self.blank(layers[path], state, facts)
            part.load_state_dict(state)
            found.append((layers[path], part.to(layers[path].weight.device)))
        self.enter(name, found)

    @staticmethod
    def enter(name: str, found: list[tuple[Layer, Part]]) -> None:
        for layer, part in found:
            part.train(layer.module.training)
            add_part(layer.module, name, part)


@dataclasses.dataclass
class Attached:
    """What a model with adapters has in its attribute `_attached`."""

    flags: dict[str, bool]  # requires_grad of the parameters of the base before
    buffers: dict[str, Tensor]  # running statistics before
    methods: dict[str, Method] = dataclasses.field(default_factory=dict)
    merged: list[tuple[str, list]] = dataclasses.field(default_factory=list)  # name and what to write back, in order
    activations: str = "exact"


def attached(model: nn.Module) -> Attached | None:
    return getattr(model, "_attached", None)


def method_of(model: nn.Module, name: str) -> Method:
    """The adapter called `name`. Raises ValueError when the model has none of that name."""
    there = attached(model)
    names = list(there.methods) if there else []
    if name not in names:
        raise ValueError(f"name {name!r} is no adapter of this model; it has {', '.join(map(repr, names)) or 'none'}")
    return there.methods[name]
