"""Whole numbers in few bytes: the steps between them, seven bits a byte.

Ascending places that lie 50 apart take one byte each and a little, where int64 takes eight.
"""

import torch
from torch import Tensor


def pack_index(index: Tensor) -> Tensor:
    """int64, any shape, 0 or more -> uint8. The first byte says whether steps have a sign, where some go down."""
    flat = index.detach().cpu().flatten()
    steps = flat.diff(prepend=flat.new_zeros(1))
    signed = bool((steps < 0).any())
    codes = (steps << 1) ^ (steps >> 63) if signed else steps
    groups, more = [], torch.ones_like(codes, dtype=torch.bool)
    while more.any():
        rest = codes >> 7
        groups.append(torch.where(more, (codes & 127) | ((rest > 0) << 7), -1))
        more, codes = more & (rest > 0), rest
    packed = torch.stack(groups, 1).flatten() if groups else codes
    return torch.cat([packed.new_tensor([signed]), packed[packed >= 0]]).to(torch.uint8)


def unpack_index(packed: Tensor, count: int) -> Tensor:
    """The inverse: int64 (count,). Raises ValueError where the bytes are not those of so many numbers."""
    signed, wide = packed[0] == 1, packed[1:].to(torch.int64)
    last = wide < 128
    if int(last.sum()) != count or (count and not last[-1]):
        raise ValueError(f"index of {int(last.sum())} numbers where {count} were saved")
    number = last.cumsum(0) - last.long()  # of the value that a byte belongs to
    begins = torch.cat([last.new_ones(1), last])[:-1]
    place = torch.arange(len(wide)) - torch.arange(len(wide))[begins][number]
    codes = torch.zeros(count, dtype=torch.int64).index_add_(0, number, (wide & 127) << (7 * place))
    return ((codes >> 1) ^ -(codes & 1) if signed else codes).cumsum(0)
