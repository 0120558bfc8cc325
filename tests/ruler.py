"""The ruler of the tests: the CPU allocator's own events, exact and repeatable."""

import gc

from torch.profiler import ProfilerActivity, profile


def allocations(fn) -> list[int]:
    """Bytes that each allocator event of fn() took (+) or gave back (-), in order."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        fn()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def peak_bytes(fn, warmup: int = 1) -> int:
    """Most bytes that fn() held at once above what was held when it began; `warmup` runs go first."""
    for _ in range(warmup):
        fn()
    level = peak = 0
    for nbytes in allocations(fn):
        level += nbytes
        peak = max(peak, level)
    return peak
