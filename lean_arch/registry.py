"""Names for what can be chosen by name: sequence architectures, attention layers, adapters.

Image architectures have timm's registry; everything here keeps to the same verbs.
"""

import difflib
import fnmatch
from collections.abc import Callable
from typing import TypeVar

Thing = TypeVar("Thing")


class Registry:
    """A table from names to classes or functions. `kind` is the word for them in messages: "arch", "adapter"."""

    def __init__(self, kind: str):
        self.kind = kind
        self.things = {}

    def register(self, name: str) -> Callable[[Thing], Thing]:
        """A decorator that enters a class or function as `name`. Raises ValueError when the name is taken."""

        def enter(thing: Thing) -> Thing:
            if name in self.things:
                raise ValueError(f"{self.kind} {name!r} is registered already; take another name")
            self.things[name] = thing
            return thing

        return enter

    def names(self, filter: str = "*") -> list[str]:
        """The names that match the shell pattern `filter`, sorted."""
        return sorted(fnmatch.filter(self.things, filter))

    def get(self, name: str):
        """What is registered as `name`. Raises ValueError, with the nearest names, when nothing is."""
        if name not in self.things:
            raise ValueError(unknown(self.kind, name, self.names(), self.names()))
        return self.things[name]

    def __contains__(self, name: str) -> bool:
        return name in self.things


def unknown(kind: str, name: str, known: list[str], shown: list[str]) -> str:
    """The sentence for a name that does not exist: the nearest of `known`, or those of `shown` where none is near."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(near)}" if near else f"there are {', '.join(shown) or 'none'}"
    return f"{kind} {name!r} does not exist; {hint}"


SEQUENCE_MODELS = Registry("arch")
ATTENTION = Registry("attention")
ADAPTERS = Registry("adapter")
