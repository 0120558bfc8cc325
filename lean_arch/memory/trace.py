"""What a step would take, found by running its own code on fake tensors: shapes and dtypes without data.

Every operator passes a dispatch mode that enters the birth and death of each storage in a ledger, adds the
scratch memory that the real kernel would take (`lean_arch.memory.scratch`) and counts floating-point operations.
"""

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lean_arch.memory.holdings import Holdings, storages
from lean_arch.memory.ledger import Ledger, Report
from lean_arch.memory.scratch import PROBED, Probe, probe, rule


@dataclasses.dataclass(frozen=True)
class Forecast(Report):
    """A `Report` foretold, and the floating-point operations of the step (a multiply-add counts as two)."""

    flops: int


def forecast(build: Callable[[], tuple]) -> Forecast:
    """What `measure(fn, *held)` would report for the second call of a step, without running it.

    `build()` is called under fake tensors and returns `(fn, *held)`: the step, then the modules, optimizers and
    tensors that it uses. Bring existing ones in with `fake_copy`; tensors made inside are fake already. The state of
    the optimizers is there when `fn` runs, once. A Python number read from a fake tensor is 1.
    """
    # torch.compile refuses to run under a dispatch mode; what an optimizer compiles runs as it is written
    with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
        fn, *held = build()
        holdings = Holdings.of(held)
        with Trace(holdings):  # keeps the counters of the state real, as in the step itself
            _prime(holdings)
        trace = Trace(holdings)
        with trace:
            fn()
    return trace.forecast()


def _prime(holdings: Holdings) -> None:
    """Lets each optimizer make its state, by a step on empty gradients."""
    for optimizer in holdings.optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        for parameter, gradient in zip(parameters, before):
            parameter.grad = gradient


def fake_copy(thing):
    """A module or tensor on fake tensors, inside `build` of `forecast`; the original is left untouched.

    No memory is taken for the copy's parameters and buffers; they start without gradients. Other tensors that a module
    holds stay real.
    """
    mode = torch._guards.detect_fake_mode()
    if isinstance(thing, torch.Tensor):
        return mode.from_tensor(thing)
    fakes = {}
    for tensor in (*thing.parameters(), *thing.buffers()):
        fakes[id(tensor)] = mode.from_tensor(tensor)
        fakes[id(tensor)].grad = None
    with _disable_current_modes():  # a module may hold tensors besides, as an adapter what weights were before
        return copy.deepcopy(thing, fakes)


class Trace(TorchDispatchMode):
    """Within, the storages of fake tensors are entered in a ledger as they come and go."""

    def __init__(self, holdings: Holdings):
        super().__init__()
        self.holdings = holdings
        self.ledger = Ledger()
        self.flops = 0
        self.blocks = {}  # address of a living storage -> block
        self.probes = {}  # block of scratch memory -> the call that takes it
        self.watches = []
        self.hooks = []

    def __enter__(self):
        for storage, category in self.holdings:
            if storage._cdata not in self.blocks:
                self.ledger.hold(self._watch(storage), storage.nbytes(), category)
        for parameter in self.holdings.parameters():
            if parameter.requires_grad:
                self.hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient))
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for hook in self.hooks:
            hook.remove()
        for storage, category in self.holdings.optimizer_state():
            self.ledger.category.setdefault(self.blocks[storage._cdata], category)
        for watch in self.watches:
            watch.detach()

    def forecast(self) -> Forecast:
        self.ledger.sizes.update(zip(self.probes, probe(list(self.probes.values()))))
        return Forecast(**vars(self.ledger.report()), flops=self.flops)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        fake = any(isinstance(leaf, FakeTensor) for leaf in inputs)
        if fake and func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if fake and _writes_in_place(func):
            self._pass(object(), rule(func, args, kwargs, args[0]))
            return args[0]
        out = None if inputs and not fake else func(*args, **kwargs)
        if not fake and (inputs or (isinstance(out, torch.Tensor) and out.numel() <= 1)):
            # random states and counters (an optimizer's steps, a scaler's verdict) keep their values
            with _disable_current_modes():
                out = func(*args, **kwargs)
        self._enter(func, args, kwargs, out)
        return out

    def _enter(self, func, args, kwargs, out):
        for leaf in tree_leaves(out):
            for storage in storages(leaf) if isinstance(leaf, torch.Tensor) else ():
                if storage._cdata not in self.blocks:
                    self.ledger.open(self._watch(storage), storage.nbytes())
        block = object()
        if func.overloadpacket in PROBED:
            self.probes[block] = Probe(func, args, kwargs)
            self._pass(block, 0)
        else:
            self._pass(block, rule(func, args, kwargs, out))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)

    def _pass(self, block, nbytes):
        self.ledger.open(block, nbytes)
        self.ledger.close(block)

    def _watch(self, storage):
        address, block = storage._cdata, object()
        self.blocks[address] = block
        self.watches.append(weakref.finalize(storage, self._dies, address, block))
        return block

    def _dies(self, address, block):
        del self.blocks[address]
        self.ledger.close(block)

    def _gradient(self, parameter: nn.Parameter):
        for storage in storages(parameter.grad):
            self.ledger.gradient(self.blocks[storage._cdata])


@functools.cache
def _writes_in_place(func) -> bool:
    """Elementwise operators that end in an underscore change no shape and make no tensor: on fakes, nothing."""
    name = func.overloadpacket.__name__
    return torch.Tag.pointwise in func.tags and name.endswith("_") and not name.startswith("_")
