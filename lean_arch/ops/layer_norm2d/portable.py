"""LayerNorm over channels by PyTorch's operators, some images at a time.

They are the kernels of F.layer_norm, so the numbers are its own. They want the channels of a pixel side by side and
copy maps that are otherwise; here only a slice is copied. Backward, mean and rstd are computed again.

Shapes as in reference.py; rows (B, H, W, C).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_arch.ops.layer_norm2d.reference import new_map, wide
from lean_arch.ops.plain_convolution import slices

_norm = torch.ops.aten.native_layer_norm
_norm_backward = torch.ops.aten.native_layer_norm_backward


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As in reference.py."""
    affine, rows = _widened(x, weight, bias), x.permute(0, 2, 3, 1)
    if rows.is_contiguous() and x.dtype == wide(x.dtype):  # nothing to copy
        return _norm(rows, rows.shape[3:], *affine, eps)[0].permute(0, 3, 1, 2)
    out = new_map(x)
    for part in slices(x):
        rows = _rows(x[part])
        out[part] = _norm(rows, rows.shape[3:], *affine, eps)[0].permute(0, 3, 1, 2)
    return out


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As in reference.py."""
    affine = _widened(x, weight, bias)
    of_x = new_map(x) if needs[0] else None
    of_affine = [x.new_zeros(x.shape[1], dtype=wide(x.dtype)) if need else None for need in needs[1:]]

    def differentiate(part: slice):  # its own scope: nothing of a slice outlives it
        rows, g = _rows(x[part]), _rows(grad[part], wide(x.dtype))
        _, mean, rstd = _norm(rows, rows.shape[3:], None, None, eps)
        of_rows, *shares = _norm_backward(g, rows, rows.shape[3:], mean, rstd, *affine, list(needs))
        if needs[0]:
            of_x[part] = of_rows.permute(0, 3, 1, 2)
        for total, share in zip(of_affine, shares):
            if total is not None:
                total += share

    for part in slices(x):
        differentiate(part)
    return of_x, *of_affine


def _rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.permute(0, 2, 3, 1).to(dtype or wide(x.dtype)).contiguous()


def _widened(x: Tensor, *affine: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(wide(x.dtype)) for t in affine]
