"""What a step uses: its modules, optimizers and tensors, and the storages behind them."""

import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: several for a wrapper such as a quantised one."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    else:
        parts = (tensor.indices(), tensor.values()) if tensor.layout == torch.sparse_coo else ()
        for part in parts:
            yield part.untyped_storage()


@dataclasses.dataclass
class Holdings:
    """The tensors a step uses, by what they are for. Later calls find state that did not exist before."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, things: Iterable) -> "Holdings":
        """Sorts modules, optimizers and tensors (also in lists, tuples and dicts).

        Raises TypeError for anything else.
        """
        found = cls([], [], [])
        for thing in things:
            if isinstance(thing, nn.Module):
                found.modules.append(thing)
            elif isinstance(thing, torch.optim.Optimizer):
                found.optimizers.append(thing)
            elif isinstance(thing, torch.Tensor):
                found.tensors.append(thing)
            elif isinstance(thing, (list, tuple, dict)):
                inner = cls.of(thing.values() if isinstance(thing, dict) else thing)
                found.modules += inner.modules
                found.optimizers += inner.optimizers
                found.tensors += inner.tensors
            else:
                raise TypeError(f"held must be modules, optimizers or tensors, not {type(thing).__name__}")
        return found

    def parameters(self) -> list[torch.Tensor]:
        everything = [p for module in self.modules for p in module.parameters()]
        everything += [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        everything += [t for t in self.tensors if isinstance(t, nn.Parameter)]
        return list({id(p): p for p in everything}.values())

    def __iter__(self) -> Iterator[tuple[torch.UntypedStorage, str]]:
        """(storage, category) of every tensor held now; one storage may come more than once."""
        parameters = self.parameters()
        buffers = [b for module in self.modules for b in module.buffers()]
        for tensor in parameters + buffers:
            yield from ((storage, "weights") for storage in storages(tensor))
        for parameter in parameters:
            if parameter.grad is not None:
                yield from ((storage, "gradients") for storage in storages(parameter.grad))
        yield from self.optimizer_state()
        for tensor in self.tensors:
            yield from ((storage, "other") for storage in storages(tensor))

    def optimizer_state(self) -> Iterator[tuple[torch.UntypedStorage, str]]:
        for optimizer in self.optimizers:
            for tensor in _tensors_in(list(optimizer.state.values())):
                yield from ((storage, "optimizer") for storage in storages(tensor))


def _tensors_in(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def used_by(fn) -> list:
    """Modules, optimizers and tensors that a function can reach.

    Looks into closures, default arguments, functools.partial, the attributes of a bound `self`, the globals that
    the code names, and into the functions, lists, tuples and dicts found there.
    """
    found, seen, queue = [], set(), [fn]
    while queue:
        thing = queue.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
            found.append(thing)
        elif isinstance(thing, (list, tuple, set)):
            queue.extend(thing)
        elif isinstance(thing, dict):
            queue.extend(thing.values())
        elif isinstance(thing, functools.partial):
            queue.extend([thing.func, thing.args, thing.keywords])
        elif isinstance(thing, types.MethodType):
            queue.extend([thing.__func__, thing.__self__, getattr(thing.__self__, "__dict__", {})])
        elif isinstance(thing, types.FunctionType) and not (thing.__module__ or "").startswith("torch"):
            queue.extend([*_named_by(thing), thing.__defaults__ or (), thing.__kwdefaults__ or {}])
    return found


def _named_by(function: types.FunctionType) -> Iterator:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # assigned only later
            continue
    codes = [function.__code__]
    for code in codes:
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
