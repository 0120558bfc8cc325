"""Other behaviour for a module that stays the same object: its class becomes a subclass of itself and a mixin.

So names, hooks, state_dict, isinstance, indexing, deepcopy and pickle work as before; `revert` gives the class back.
A mixin is a subclass of `Mixin` whose methods call super() for what the module did before.
"""

import functools

from torch import nn


class Mixin(nn.Module):  # of the same layout as what it is mixed into, or Python refuses the new class
    """What the mixins have in common."""

    def __reduce_ex__(self, protocol):
        return _revive, (_plain(type(self)), _mixed(type(self))), self.__dict__


def become(module: nn.Module, mixin: type[Mixin], *options) -> None:
    """Mixes `mixin` into the class of `module`, in place. `options` must be hashable; `options_of` gives them back."""
    module.__class__ = _subclass(type(module), mixin, options)


def options_of(module: nn.Module, mixin: type[Mixin]) -> tuple:
    """The options with which `module` became one of `mixin`, or of one derived from it."""
    return next(options for kind, options in _mixed(type(module)) if issubclass(kind, mixin))


def revert(module: nn.Module, mixin: type[Mixin]) -> None:
    """Takes `mixin` and those derived from it out of the class of `module`, in place, and leaves the others in."""
    cls = type(module)
    left = tuple((kind, options) for kind, options in _mixed(cls) if not issubclass(kind, mixin))
    if left != _mixed(cls):
        module.__class__ = _class(_plain(cls), left)


def _plain(cls):
    return cls.__dict__.get("_plain_class", cls)


def _mixed(cls):
    return cls.__dict__.get("_mixed_in", ())


def _class(plain, mixed):
    for mixin, options in mixed:
        plain = _subclass(plain, mixin, options)
    return plain


@functools.cache
def _subclass(cls, mixin, options):
    # the name stays, because sharding policies find the layers to wrap by it
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": None}
    own = {"_plain_class": _plain(cls), "_mixed_in": (*_mixed(cls), (mixin, options))}
    return type(cls.__name__, (mixin, cls), names | own)


def _revive(plain, mixed):
    cls = _class(plain, mixed)
    return cls.__new__(cls)
