"""What tests of every floor share: the memory ruler."""

import gc

import pytest
from torch.profiler import ProfilerActivity, profile


@pytest.fixture
def peak_bytes():
    """peak_bytes(fn): most bytes of CPU memory that a second call of fn() held at once above where it began."""

    def measure(fn):
        fn()  # gradients exist from here on
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            fn()
        events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
        level = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            level += event.nbytes()
            peak = max(peak, level)
        return peak

    return measure
