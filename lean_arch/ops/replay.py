"""Run a computation a second time exactly as the first: same random numbers, same autocast, one update of BatchNorm.

For what runs a module again during backward: reversible stacks and checkpointing.
"""

import contextlib

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


def autocast_as_now(device: torch.device, cache: bool = False):
    """A maker of contexts that bring back today's autocast for `device` and the CPU.

    Autocast's weight cache is off unless `cache`: it would hold a 16-bit copy of every weight until the outermost
    autocast ends. Who asks for it clears it (`torch.clear_autocast_cache()`).
    """
    kinds = {device.type, "cpu"} - {"meta"}
    states = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextlib.contextmanager
    def context():
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in states:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=cache))
            yield

    return context


class Replay:
    """The random state a computation on `device` starts from; `with replay.again():` runs it once more from there.

    It is dropped by `settle()` when the first run drew nothing, so a layer without dropout costs no bytes. The
    caller's own random stream is never disturbed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.cpu_rng = torch.get_rng_state()
        self.module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self.device_rng = self.module.get_rng_state(device) if self.module else None

    def settle(self):
        """Call after the first run: forget the random states that it did not use."""
        if _same(self.cpu_rng, torch.get_rng_state()):
            self.cpu_rng = None
        if self.device_rng is not None and _same(self.device_rng, self.module.get_rng_state(self.device)):
            self.device_rng = None

    @contextlib.contextmanager
    def again(self):
        with contextlib.ExitStack() as stack:
            if self.cpu_rng is not None:
                now = torch.get_rng_state()
                stack.callback(torch.set_rng_state, now)
                torch.set_rng_state(self.cpu_rng)
            if self.device_rng is not None:
                stack.callback(self.module.set_rng_state, self.module.get_rng_state(self.device), self.device)
                self.module.set_rng_state(self.device_rng, self.device)
            yield


def _same(state: torch.Tensor, other: torch.Tensor) -> bool:
    with _disable_current_modes():  # random states stay real when torch runs on fake tensors
        return torch.equal(state, other)


def module_twin(module: nn.Module, parameters: dict[nn.Parameter, torch.Tensor]) -> nn.Module:
    """A module that computes as `module` does, with other `parameters`, and leaves it as it is.

    It shares all else, but BatchNorm updates running statistics of its own, which go with it.
    """
    return _twin(module, parameters, {})


def _twin(original, parameters, twins):  # no closure over itself, which would outlive the call with all gradients
    if original not in twins:
        twin = twins[original] = object.__new__(type(original))
        twin.__dict__.update(original.__dict__)
        twin._parameters = {name: parameters.get(p, p) for name, p in original._parameters.items()}
        if "_flat_weights" in twin.__dict__:  # of recurrent layers
            twin._flat_weights = [parameters.get(p, p) for p in original._flat_weights]
        if isinstance(original, nn.modules.batchnorm._NormBase) and original.training:
            twin._buffers = {name: None if b is None else b.clone() for name, b in original._buffers.items()}
        twin._modules = {n: None if m is None else _twin(m, parameters, twins) for n, m in original._modules.items()}
    return twins[original]
