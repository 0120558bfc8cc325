"""The zoo: one family a file. `create_model` builds any lean_* or timm architecture by its name."""

import difflib
import fnmatch

import timm
from torch import nn

from lean_arch.models import lean_vit

__all__ = ["check_name", "create_model", "lean_vit", "list_models"]


def list_models(filter: str = "*") -> list[str]:
    """Names of the zoo's architectures, all `lean_*`, that match the shell pattern `filter`."""
    return fnmatch.filter(timm.list_models("lean_*"), filter)


def create_model(name: str, **kwargs) -> nn.Module:
    """Build `name` (a lean_* architecture or any of timm's); `kwargs` go to its constructor.

    Raises ValueError, with the nearest names, when there is no such architecture.
    """
    check_name(name)
    return timm.create_model(name, **kwargs)


def check_name(name: str) -> None:
    """Raises ValueError, with the nearest names, when there is no architecture `name`."""
    if not timm.is_model(name.split(".")[0].split(":")[-1].split("/")[-1]):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(near)}" if near else f"the zoo has {', '.join(list_models())}"
        raise ValueError(f"arch {name!r} does not exist; {hint}")
