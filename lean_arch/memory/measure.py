"""Peak memory of a step as it really runs, from the allocator's own events, and what it consisted of."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from lean_arch.memory.holdings import Holdings, used_by
from lean_arch.memory.ledger import Ledger, Report

MARK = "lean_arch gradient at "
CUDA_GRAIN = 512  # bytes: CUDA's caching allocator rounds every block up to a multiple


def measure(fn: Callable[[], object], *held) -> Report:
    """Runs `fn()` once and reports the most memory in use during it.

    The peak is what was held before (parameters, buffers, gradients, optimizer state, tensors; each storage once)
    plus the most that `fn` held above it, on the device of the parameters: the CPU or an accelerator (allocated
    bytes, not those its allocator keeps in reserve). Call `fn` once before where the steady state is wanted: the
    first step of an optimizer makes its state.

    Args:
        fn: a step to run, without arguments.
        held: the modules, optimizers and tensors that it uses, also in lists or dicts. When none is given, they
            are found through `fn`: its closure, bound `self`, partial arguments, defaults and globals.

    Raises TypeError if something in `held` is none of these.
    """
    holdings = Holdings.of(held or used_by(fn))
    device = next((t.device.type for t in (*holdings.parameters(), *holdings.tensors)), "cpu")
    ledger = Ledger()
    alive = {}  # address -> block
    for storage, category in holdings:
        address = storage.data_ptr()
        if storage.device.type == device and address not in alive:
            alive[address] = ("held", address)
            ledger.hold(alive[address], _occupied(storage), category)
    profiler = profile(activities=_activities(device), profile_memory=True)
    with _marked_gradients(holdings), _running(profiler):
        fn()
    for number, (event, marked) in enumerate(_events(profiler, device)):
        if marked is not None:
            if marked in alive:
                ledger.gradient(alive[marked])
        elif event.alloc_size > 0:
            alive[event.ptr] = number
            ledger.open(number, event.alloc_size)
        else:
            if event.ptr not in alive:  # held by fn's surroundings until now
                alive[event.ptr] = ("found", number)
                ledger.hold(alive[event.ptr], -event.alloc_size, "other")
            ledger.close(alive.pop(event.ptr))
    for storage, category in holdings.optimizer_state():
        if storage.data_ptr() in alive:
            ledger.category.setdefault(alive[storage.data_ptr()], category)
    return ledger.report()


def _occupied(storage: torch.UntypedStorage) -> int:
    nbytes = storage.nbytes()
    return -(-nbytes // CUDA_GRAIN) * CUDA_GRAIN if storage.device.type == "cuda" else nbytes


def _activities(device: str) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU] if device == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]


@contextlib.contextmanager
def _running(profiler: profile):
    """The profiler switched on, without the lines that its start and stop write to the error stream."""
    with _silent_stderr():
        profiler.__enter__()
    try:
        yield
    finally:
        with _silent_stderr():
            profiler.__exit__(None, None, None)


@contextlib.contextmanager
def _silent_stderr():
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # the lines come from C++, past sys.stderr
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextlib.contextmanager
def _marked_gradients(holdings: Holdings):
    """Within, the arrival of each parameter's gradient leaves a mark with its address among the events."""

    def mark(parameter):
        with record_function(f"{MARK}{parameter.grad.untyped_storage().data_ptr()}"):
            pass

    parameters = [p for p in holdings.parameters() if p.requires_grad and p.is_leaf]
    handles = [parameter.register_post_accumulate_grad_hook(mark) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _events(profiler: profile, device: str) -> Iterator[tuple[object, int | None]]:
    """(allocation event, None) or (None, address of a gradient), in the order of time."""
    queue, times = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    for event in queue:
        queue.extend(event.children)
        kind, fields = event.typed
        if kind == _EventType.Allocation and fields.device.type == device:
            times.append((event.start_time_ns, len(times), fields, None))
        elif event.name.startswith(MARK):
            times.append((event.start_time_ns, len(times), None, int(event.name.removeprefix(MARK))))
    for _, _, fields, address in sorted(times):
        yield fields, address
