"""The zoo: one family a file. `create_model` builds any lean_* or timm architecture by its name."""

import fnmatch

import timm
from torch import nn

from lean_arch.models import (
    lean_bigbird,
    lean_convnext,
    lean_efficientnet,
    lean_lm,
    lean_longformer,
    lean_mobilenet,
    lean_reformer,
    lean_revnet,
    lean_vit,
)
from lean_arch.registry import SEQUENCE_MODELS, unknown

__all__ = [
    "check_name",
    "create_model",
    "lean_bigbird",
    "lean_convnext",
    "lean_efficientnet",
    "lean_lm",
    "lean_longformer",
    "lean_mobilenet",
    "lean_reformer",
    "lean_revnet",
    "lean_vit",
    "list_models",
]


def list_models(filter: str = "*") -> list[str]:
    """Names of the zoo's architectures, all `lean_*`, that match the shell pattern `filter`."""
    return sorted(fnmatch.filter(timm.list_models("lean_*"), filter) + SEQUENCE_MODELS.names(filter))


def create_model(name: str, **kwargs) -> nn.Module:
    """Build `name` (a lean_* architecture, for images or sequences, or any of timm's); `kwargs` go to its constructor.

    Raises ValueError, with the nearest names, when there is no such architecture.
    """
    check_name(name)
    if name in SEQUENCE_MODELS:
        return SEQUENCE_MODELS.get(name)(**kwargs)
    return timm.create_model(name, **kwargs)


def check_name(name: str) -> None:
    """Raises ValueError, with the nearest names, when there is no architecture `name`."""
    if name not in SEQUENCE_MODELS and not timm.is_model(name.split(".")[0].split(":")[-1].split("/")[-1]):
        raise ValueError(unknown("arch", name, [*timm.list_models(), *SEQUENCE_MODELS.names()], list_models()))
