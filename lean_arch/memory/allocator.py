"""What PyTorch's allocator did while some code ran: every block that came and went, in order."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "lean_arch mark: "


class Event(NamedTuple):
    """A block of `nbytes` allocated (or, below zero, freed) at `address`; or the `mark` of some code's own."""

    address: int = 0
    nbytes: int = 0
    mark: str | None = None


def mark(text: str) -> None:
    """Leaves `text` among the events being recorded."""
    with record_function(MARK + text):
        pass


@contextlib.contextmanager
def recording(device: str = "cpu") -> Iterator[list[Event]]:
    """Gives a list that holds the events of the `device`'s allocator, once the block is left."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    profiler, events = profile(activities=activities, profile_memory=True), []
    with _silent_stderr():
        profiler.__enter__()
    try:
        yield events
    finally:
        with _silent_stderr():
            profiler.__exit__(None, None, None)
    queue, timed = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    for entry in queue:
        queue.extend(entry.children)
        kind, fields = entry.typed
        if kind == _EventType.Allocation and torch.device(fields.device).type == device:
            timed.append((entry.start_time_ns, len(timed), Event(fields.ptr, fields.alloc_size)))
        elif entry.name.startswith(MARK):
            timed.append((entry.start_time_ns, len(timed), Event(mark=entry.name.removeprefix(MARK))))
    events.extend(event for _, _, event in sorted(timed))


@contextlib.contextmanager
def _silent_stderr():
    """Keeps off the screen what the profiler writes when it starts and stops, from C++ and past `sys.stderr`."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
