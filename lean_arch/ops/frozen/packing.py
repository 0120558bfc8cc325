"""Codes of a few bits, several to a byte, written and read a slice at a time.

Elements count in the order they have in memory. A slice of them is cut into 8 / bits runs of equal length, and byte j
of it holds the j-th code of every run: so packing is arithmetic on whole runs, without a gather.

Shapes: x of any shape, dense; packed (ceil(x.numel() bits / 8),) uint8.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lean_arch.ops.plain_convolution import slices

SLICE = 2**18  # elements on a CPU; a multiple of 8, so that slices begin at bytes


def flat(x: Tensor) -> Tensor:
    """The elements of a dense tensor in the order they have in memory, a view."""
    return x.as_strided((x.numel(),), (1,))


def dense(x: Tensor) -> Tensor:
    """x, or a contiguous copy where its elements do not fill a stretch of memory."""
    return x if torch.ops.aten.is_non_overlapping_and_dense(x) else x.contiguous()


def in_layout(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x, or a copy of those strides."""
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def parts_of(x: Tensor) -> Iterator[slice]:
    """Slices of flat(x)."""
    return slices(flat(x), elements=SLICE)


def pack(x: Tensor, bits: int, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """The codes (uint8, below 2^bits) that `encode` gives for slices of flat(x)."""
    source, share = flat(x), 8 // bits
    packed = x.new_zeros(-(-x.numel() // share), dtype=torch.uint8)
    for part in parts_of(x):
        codes = encode(source[part])
        place = _place(packed, part, share)
        for number, run in enumerate(codes.split(max(len(place), 1))):
            place[: len(run)].add_(run, alpha=1 << bits * number)
    return packed


def unpack(packed: Tensor, part: slice, bits: int) -> Tensor:
    """The codes (uint8) of one of the slices."""
    place = _place(packed, part, 8 // bits)
    codes = packed.new_empty(part.stop - part.start)
    for number, run in enumerate(codes.split(max(len(place), 1))):
        torch.bitwise_right_shift(place[: len(run)], bits * number, out=run)
    return codes.bitwise_and_((1 << bits) - 1)


def _place(packed, part, share):
    start = part.start // share
    return packed[start : start + -(-(part.stop - part.start) // share)]
