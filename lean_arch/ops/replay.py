"""Run a computation a second time exactly as the first: same random numbers, same autocast, one update of BatchNorm.

Reversible stacks and checkpointing both replay a module during backward. What they share lives here.
"""

import contextlib

import torch
from torch import nn


def autocast_state(device: torch.device) -> list[contextlib.AbstractContextManager]:
    """Contexts that bring back today's autocast for `device` and the CPU, with its weight cache off.

    The cache would hold a 16-bit copy of every weight until the outermost autocast ends.
    """
    return [
        torch.autocast(
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=False,
        )
        for kind in {device.type, "cpu"}
    ]


class Replay:
    """The state a computation on `device` starts from; `with replay.again():` runs it once more from there.

    The random states are dropped by `settle()` when the first run drew nothing, so a layer without dropout
    costs no bytes. The caller's own random stream is never disturbed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.autocast = autocast_state(device)
        self.cpu_rng = torch.get_rng_state()
        self.device_rng = None if device.type in ("cpu", "meta") else _generator(device).get_rng_state(device)

    def settle(self):
        """Call after the first run: forget the random states that it did not use."""
        if torch.equal(self.cpu_rng, torch.get_rng_state()):
            self.cpu_rng = None
        if self.device_rng is not None and torch.equal(
            self.device_rng, _generator(self.device).get_rng_state(self.device)
        ):
            self.device_rng = None

    @contextlib.contextmanager
    def again(self):
        with contextlib.ExitStack() as stack:
            for context in self.autocast:
                stack.enter_context(context)
            if self.cpu_rng is not None:
                now = torch.get_rng_state()
                stack.callback(torch.set_rng_state, now)
                torch.set_rng_state(self.cpu_rng)
            if self.device_rng is not None:
                generator = _generator(self.device)
                stack.callback(generator.set_rng_state, generator.get_rng_state(self.device), self.device)
                generator.set_rng_state(self.device_rng, self.device)
            yield


def _generator(device: torch.device):
    return torch.get_device_module(device)


@contextlib.contextmanager
def frozen_statistics(module: nn.Module):
    """Within, BatchNorm layers of `module` normalise as before but do not update their running statistics."""
    layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
