"""The account of a step's memory: which blocks were alive when, what they were for, and the moment of the peak.

`measure` fills a ledger from the allocator's events, the planner from a run on fake tensors; both close it the
same way, so a measured breakdown and a predicted one mean the same thing.
"""

import dataclasses
import re

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclasses.dataclass(frozen=True)
class Report:
    """Peak memory of a step in bytes, and what it consisted of at that moment.

    `by_category` has the keys weights (parameters and buffers), gradients, optimizer (its state), activations
    (what lived between the start and the last gradient) and other (the batch, temporaries of the optimizer);
    its values sum to `peak_bytes`.
    """

    peak_bytes: int
    by_category: dict[str, int]

    def __str__(self):
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.by_category.items())
        return f"{format_bytes(self.peak_bytes)} ({parts})"


class Ledger:
    """Blocks of memory and the order in which they came and went."""

    def __init__(self):
        self.held = []  # blocks alive from the start
        self.events = []  # (block, +1 | -1)
        self.sizes = {}  # block -> bytes
        self.category = {}  # block -> category, where known
        self.last_gradient = None  # number of events when it arrived

    def hold(self, block, nbytes: int, category: str):
        """A block that was there before the first event."""
        self.held.append(block)
        self.sizes[block] = nbytes
        self.category[block] = category

    def open(self, block, nbytes: int):
        self.sizes[block] = nbytes
        self.events.append((block, 1))

    def close(self, block):
        self.events.append((block, -1))

    def gradient(self, block):
        """`block` now holds a parameter's gradient."""
        self.category.setdefault(block, "gradients")
        self.last_gradient = len(self.events)

    def report(self) -> Report:
        until = len(self.events) if self.last_gradient is None else self.last_gradient
        for index, (block, sign) in enumerate(self.events):
            if sign > 0 and block not in self.category:
                self.category[block] = "activations" if index < until else "other"
        level = dict.fromkeys(CATEGORIES, 0)
        for block in self.held:
            level[self.category[block]] += self.sizes[block]
        total = peak = sum(level.values())
        at_peak = dict(level)
        for block, sign in self.events:
            change = sign * self.sizes[block]
            level[self.category[block]] += change
            total += change
            if total > peak:
                peak, at_peak = total, dict(level)
        return Report(peak, at_peak)


def parse_bytes(text: str | int) -> int:
    """Bytes from "4GiB", "500MB", "1.5 GiB", "123B" or a plain number. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = match and UNITS.get(match[2].upper() or "B")
    nbytes = int(float(match[1]) * unit) if unit else 0
    if nbytes <= 0:
        raise ValueError(f"budget {text!r} is not an amount of memory: write it like 4GiB, 500MB or 123456B")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """1536 -> "1.5 KiB"; MiB and GiB likewise."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
