"""Putting adapters on a model, several by name, switching between them, merging them into its weights, and back.

Everything happens in place and from outside: the model keeps its class, its layers and the names of its parameters.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lean_arch.adapters.frozen import lean_frozen, restore_frozen
from lean_arch.adapters.merge import unmerge
from lean_arch.adapters.method import Attached, Method, attached, method_of
from lean_arch.adapters.whole import give_back, named_parameters, switch, take
from lean_arch.registry import ADAPTERS


def list_adapters(filter: str = "*") -> list[str]:
    """The names that `attach` takes for a method, sorted; those that match the shell pattern `filter`."""
    return ADAPTERS.names(filter)


def attach(
    model: nn.Module,
    method: str,
    *,
    name: str = "default",
    target: str | None = None,
    also_train: str | None = None,
    qkv: str = "qkv",
    activations: str = "exact",
    **options,
) -> nn.Module:
    """Freezes `model` and puts a new adapter on it, in place. Returns `model`, whose outputs are still the same.

    Args:
        method: one of `list_adapters()`.
        name: to call it by; a model can have several, and their additions add up.
        target: which layers: a preset ("layers", "linear", "attention", "mlp", "convs", "embeddings", "norms") or a
            regular expression that the whole name of a layer matches. Default: the method's own choice.
        also_train: a regular expression of parameters of the base, or of modules that hold them, to be trained whole
            and saved along, as a new head.
        qkv: of a fused query, key and value projection only these thirds, as "qv".
        activations: what frozen layers keep for the backward pass: "exact" what exact gradients need and no more,
            "compressed" 8-bit stand-ins for activations and norms, "compressed:4" and "compressed:2" fewer bits (see
            `lean_frozen`). The last adapter's choice holds for all.
        options: of the method.

    Raises ValueError or TypeError for what cannot be, and leaves `model` as it was.
    """
    made = make(method, options)
    paths = functools.partial(named_parameters, model, also_train) if also_train else list
    enter(model, made, name, activations, paths, functools.partial(made.attach, model, name, target, qkv))
    return model


def attach_saved(model: nn.Module, description: dict, name: str, saved: dict, whole: list[str]) -> None:
    """Attaches what a file holds: parts by layer name, and parameters of the base to be trained whole."""
    made = make(description["method"], description["options"])
    rebuild = functools.partial(made.rebuild, model, name, saved)
    enter(model, made, name, description["activations"], lambda: whole, rebuild)


def enter(model: nn.Module, made: Method, name: str, activations: str, whole: Callable, build: Callable) -> None:
    """All of it or nothing: `whole()` names parameters to train whole, `build()` puts parts into the frozen model."""
    there = attached(model)
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"name {name!r} must be letters, digits and _, as 'task_1'")
    if there and name in there.methods:
        raise ValueError(f"name {name!r} is taken by an adapter of this model; detach it or choose another")
    begin(model, there)
    try:
        take(model, made, whole())
        build()
        attached(model).methods[name] = made
        settle(model, activations)
    except BaseException:
        restore_frozen(model)
        made.detach(model, name)
        give_back(model, made)
        attached(model).methods.pop(name, None)
        end_if_empty(model)
        raise


def make(method: str, options: Mapping) -> Method:
    """Raises ValueError for a method that is not registered, TypeError for an option that it does not have."""
    cls = ADAPTERS.get(method)
    known = list(inspect.signature(cls).parameters)
    for option in options:
        if option not in known:
            raise TypeError(f"option {option!r} is not one of adapter {method!r}; it has {', '.join(known) or 'none'}")
    made = cls(**options)
    made.registered = method
    return made


def begin(model: nn.Module, there: Attached | None) -> None:
    """Freezes the base, where no adapter has yet."""
    restore_frozen(model)
    if there is None:
        flags = {path: parameter.requires_grad for path, parameter in model.named_parameters()}
        norms = {path: m for path, m in model.named_modules() if isinstance(m, _NormBase)}
        buffers = {
            f"{p}.{n}".lstrip("."): b.clone() for p, m in norms.items() for n, b in m._buffers.items() if b is not None
        }
        model._attached = Attached(flags, buffers)
        model.requires_grad_(False)


def settle(model: nn.Module, activations: str | None = None) -> None:
    there = attached(model)
    activations = activations or there.activations
    lean_frozen(model, activations)
    there.activations = activations


def end_if_empty(model: nn.Module) -> None:
    there = attached(model)
    if there.methods:
        settle(model)
        return
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(there.flags[path])
    with torch.no_grad():
        for path, before in there.buffers.items():
            model.get_buffer(path).copy_(before)
    del model._attached


def detach(model: nn.Module, name: str) -> nn.Module:
    """Takes the adapter `name` off, its values are lost. Without the last, `model` is what it was before the first."""
    method = method_of(model, name)
    there = attached(model)
    restore_frozen(model)
    if any(merged == name for merged, _ in there.merged):
        unmerge(model, name)
    method.detach(model, name)
    give_back(model, method)
    del there.methods[name]
    end_if_empty(model)
    return model


def trainable_parameters(model: nn.Module, name: str | None = None) -> list[nn.Parameter]:
    """The parameters to give to an optimizer: of all adapters, or of `name`. Raises ValueError where there are none."""
    if attached(model) is None:
        raise ValueError("this model has no adapter; adapters.attach(model, 'sparse') puts one on it")
    if name is None:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    method = method_of(model, name)
    parts = [p for _, _, part in method.parts(model, name) for p in part.parameters() if p.requires_grad]
    return parts + [model.get_parameter(path) for path in method.whole]


def activate(model: nn.Module, names: str | Iterable[str] | Mapping[str, float]) -> nn.Module:
    """Switches to one adapter, to several, or to several with factors {"first": 0.7, "second": 0.3}; () means none.

    The others stay on the model without effect. What an adapter trains whole (`also_train`) goes with it.

    Raises ValueError for a name that the model does not have, for one that is merged, and where two adapters train one
    parameter whole.
    """
    factors = dict.fromkeys([names], 1.0) if isinstance(names, str) else names
    factors = dict(factors) if isinstance(factors, Mapping) else dict.fromkeys(factors, 1.0)
    there, seen = attached(model), {}
    for name in factors:
        for path in method_of(model, name).whole:
            if path in seen:
                raise ValueError(f"names {seen[path]!r} and {name!r} both train {path} whole; one at a time works")
            seen[path] = name
    if there and there.merged:
        raise ValueError(f"adapter {there.merged[-1][0]!r} is merged; unmerge it before others are switched")
    for name, method in sorted(there.methods.items() if there else (), key=lambda item: item[0] in factors):
        for _, _, part in method.parts(model, name):
            part.strength = float(factors.get(name, 0.0))
        switch(model, method, name in factors)  # off first, so that what two train whole is the base's in between
    return model
