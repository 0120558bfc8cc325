"""Rotary positions: each pair of channels of a query or key is turned by an angle that grows with its position.

Paper: RoFormer (Su et al. 2021, arXiv 2104.09864), section 3.2.2; channel i is paired with channel i + D/2.

Shapes: x (B, H, N, D), D even.
"""

import torch
from torch import Tensor

BASE = 10_000.0


def rotary(x: Tensor, first: int = 0) -> Tensor:
    """`x` (B, H, N, D), whose first token is at position `first`, turned; in x's dtype.

    The scores of two turned tokens depend on the distance between them alone. Nothing of x is kept for backward.
    """
    cos, sin = angles(x.shape[-2], x.shape[-1], first, x.device)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def angles(length: int, dim: int, first: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (N, D/2) float32, of positions `first` to `first + length - 1`."""
    with torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False):
        rates = BASE ** (torch.arange(0, dim, 2, dtype=torch.float64, device=device) / -dim)
        at = torch.arange(first, first + length, dtype=torch.float64, device=device)
        turns = at[:, None] * rates
        return turns.cos().float(), turns.sin().float()
