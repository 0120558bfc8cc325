"""Peak memory of a step as it really runs, from the allocator's own events, and what it consisted of."""

import contextlib
import weakref
from collections.abc import Callable

import torch

from lean_arch.memory.allocator import mark, recording
from lean_arch.memory.holdings import Holdings, used_by
from lean_arch.memory.ledger import Ledger, Report

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
    gone = set()  # addresses of held blocks whose end a mark has told already
    for storage, category in holdings:
        address = storage.data_ptr()
        if storage.device.type == device and address not in alive:
            alive[address] = ("held", address)
            ledger.hold(alive[address], _occupied(storage), category)
    with _marked(holdings, device), recording(device) as events:
        fn()
    for number, event in enumerate(events):
        if event.mark is not None:
            what, address = event.mark.split()
            if int(address) in alive and what == "gradient":
                ledger.gradient(alive[int(address)])
            elif int(address) in alive:
                ledger.close(alive.pop(int(address)))
                gone.add(int(address))
        elif event.nbytes > 0:
            alive[event.address] = number
            gone.discard(event.address)
            ledger.open(number, event.nbytes)
        elif event.address not in gone:
            if event.address not in alive:  # held by fn's surroundings until now
                alive[event.address] = ("found", number)
                ledger.hold(alive[event.address], -event.nbytes, "other")
            ledger.close(alive.pop(event.address))
    for storage, category in holdings.optimizer_state():
        if storage.data_ptr() in alive:
            ledger.category.setdefault(alive[storage.data_ptr()], category)
    return ledger.report()


def _occupied(storage: torch.UntypedStorage) -> int:
    nbytes = storage.nbytes()
    return -(-nbytes // CUDA_GRAIN) * CUDA_GRAIN if storage.device.type == "cuda" else nbytes


@contextlib.contextmanager
def _marked(holdings: Holdings, device: str):
    """Within, gradients that arrive leave a mark among the events, and so do held storages that go.

    The CPU's allocator knows only blocks that some recording saw begin, and reports the end of no other.
    """

    def arrived(parameter):
        mark(f"gradient {parameter.grad.untyped_storage().data_ptr()}")

    parameters = [p for p in holdings.parameters() if p.requires_grad and p.is_leaf]
    handles = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in parameters]
    watches = [
        weakref.finalize(storage, mark, f"gone {storage.data_ptr()}") for storage, _ in holdings if device == "cpu"
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for watch in watches:
            watch.detach()
