"""Fine-tuning in the loop: weights to start from, and the adapter that is trained on them.

`--adapter sparse`, or with the method's options, and attach's, after a colon: `sparse:density=0.02,target=mlp`.
"""

import functools
import inspect
import json
import pathlib

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from lean_arch import adapters
from lean_arch.adapters.files import base_hash
from lean_arch.adapters.method import attached
from lean_arch.registry import ADAPTERS
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import Data, one_line

NAME = "task"  # of a run's adapter
SEEN = 32  # training samples that a method may look at before it chooses weights


def parse_adapter(text: str) -> tuple[str, dict]:
    """(method, options) of `METHOD` or `METHOD:option=value,...`. Raises InputError for another form."""
    method, _, rest = text.partition(":")
    if method not in ADAPTERS:
        raise InputError(f"adapter {text!r} does not exist; {', '.join(ADAPTERS.names())} do")
    options = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not (equals and key.isidentifier()):
            raise InputError(f"adapter {text!r} has {word!r} for an option; {method}:target=mlp would be one")
        try:
            options[key] = json.loads(value)
        except ValueError:  # a word
            options[key] = value
    return method, options


def load_weights(config: TrainConfig, model: nn.Module) -> list[str]:
    """Puts the weights of `config.init_from` into `model`, in place. Returns the classifier's parameters it left out.

    Those are left as they are where the file has them for another number of classes. Raises InputError where a file
    cannot be read, or anything else does not fit.
    """
    path = pathlib.Path(config.init_from)
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        weights = safetensors.torch.load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError(f"init_from {config.init_from!r} is no safetensors file or run: {one_line(error)}") from error
    own, heads = model.state_dict(), head_parameters(model)
    new = [name for name in heads if name in weights and weights[name].shape != own[name].shape]
    for name, tensor in weights.items():
        if name not in own or (own[name].shape != tensor.shape and name not in new):
            found = f"has it as {tuple(own[name].shape)}" if name in own else "has no such weight"
            brought = f"init_from {config.init_from!r} has {name} as {tuple(tensor.shape)}"
            raise InputError(f"{brought}, but arch {config.arch} {found}")
    missing = sorted(own.keys() - weights.keys())
    if missing:
        raise InputError(f"init_from {config.init_from!r} lacks {missing[0]}, which arch {config.arch} has")
    model.load_state_dict({name: tensor for name, tensor in weights.items() if name not in new}, strict=False)
    return new


def head_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of an image model's classifier, or of its classifiers."""
    if not hasattr(model, "get_classifier"):
        return []
    heads = model.get_classifier()
    inside = {m for head in (heads if isinstance(heads, tuple) else (heads,)) for m in head.modules()}
    layers = [(path, module) for path, module in model.named_modules() if module in inside]
    return [f"{path}.{name}" for path, module in layers for name, _ in module.named_parameters(recurse=False)]


def attach_adapter(config: TrainConfig, data: Data, model: nn.Module) -> None:
    """Attaches `config.adapter` to `model`, in place; a classifier is trained whole unless `also_train` says otherwise.

    Raises InputError for what the method refuses.
    """
    method, options = parse_adapter(config.adapter)
    heads = head_parameters(model)
    if heads and "also_train" not in options:
        options["also_train"] = "|".join(name.replace(".", r"\.") for name in heads)
    if method == "ladder" and hasattr(model, "set_reversible"):
        model.set_reversible(False)  # nothing is kept of frozen layers, reversible or not, and the ladder reads them
    if "sample" in inspect.signature(ADAPTERS.get(method)).parameters:
        options |= seen(method, options, config, data, model)
    try:
        adapters.attach(model, method, name=NAME, **options)
    except (TypeError, ValueError) as error:
        raise InputError(f"adapter {config.adapter!r}: {one_line(error)}") from error


def seen(method: str, options: dict, config: TrainConfig, data: Data, model: nn.Module) -> dict:
    """What the method wants to see of the training data: inputs, or a loss."""
    inputs, targets = data.train[(0, list(range(min(SEEN, len(data.train)))))]
    if method == "ladder":
        return {"sample": inputs[:1]}
    if options.get("select") == "activation":
        return {"sample": inputs}
    if options.get("select") == "gradient":
        return {"loss": functools.partial(data.loss, model, inputs, targets, config.label_smoothing)}
    return {}


def base_of(model: nn.Module) -> str | None:
    """The hash of the base under a model's adapter; None for a model that is trained whole."""
    return base_hash(model, set()) if attached(model) else None


def changing_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the model's state what training changes: all of it but frozen parameters."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def final_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state to keep of a trained model: an adapter is merged into the weights, where weights can hold it."""
    if not attached(model):
        return model.state_dict()
    try:
        adapters.merge(model, NAME)
    except ValueError:  # a network beside the base
        return model.state_dict()
    state = {name: t.clone() for name, t in model.state_dict().items() if ".adapters." not in f".{name}"}
    adapters.unmerge(model, NAME)
    return state
