"""Parameters of the base that an adapter trains themselves: biases, norms, a new head."""

import re

import torch
from torch import nn

from lean_arch.adapters.method import Method, attached


def named_parameters(model: nn.Module, pattern: str) -> list[str]:
    """Parameters of the base whose name, or that of a module around them, `pattern` matches whole."""
    try:
        matches = re.compile(pattern).fullmatch
    except re.error as error:
        raise ValueError(f"also_train {pattern!r} is not a regular expression ({error}); 'head' is one") from error
    paths = []
    for path in attached(model).flags:
        words = path.split(".")
        if any(matches(".".join(words[:end])) for end in range(1, len(words) + 1)):
            paths.append(path)
    if not paths:
        last = ", ".join(repr(path) for path in list(attached(model).flags)[-2:])
        raise ValueError(f"also_train {pattern!r} matches no parameter; the last of this model are {last}")
    return paths


def take(model: nn.Module, method: Method, paths: list[str]) -> None:
    """Lets `method` train the parameters `paths`. Raises ValueError where another adapter does just now."""
    for path in paths:
        parameter = model.get_parameter(path)
        for name, other in attached(model).methods.items():
            if path in other.whole and other.aside is None:
                raise ValueError(
                    f"{path} is trained by adapter {name!r} already; activate(model, ()) switches that off"
                )
        method.whole[path] = parameter.detach().clone()
        parameter.requires_grad_(True)


@torch.no_grad()
def switch(model: nn.Module, method: Method, on: bool) -> None:
    """Puts what `method` trains whole into the model, or aside and the base's own in its place."""
    if on == (method.aside is None):
        return
    aside = {}
    for path, before in method.whole.items():
        parameter = model.get_parameter(path)
        aside[path] = parameter.detach().clone()
        parameter.copy_(method.aside[path] if on else before)
        parameter.requires_grad_(on)
    method.aside = None if on else aside


@torch.no_grad()
def give_back(model: nn.Module, method: Method) -> None:
    """The base's own for good."""
    switch(model, method, False)
    method.whole.clear()
