"""LayerNorm over channels as the paper writes it (Ba et al. 2016, arXiv 1607.06450), and its gradients.

    u = (x - mean) / sqrt(var + eps),    y = u * weight + bias,    mean and var over the channels of a pixel
    of_x = (h - mean(h) - u * mean(h * u)) / sqrt(var + eps),    h = grad * weight

What the other backends are measured against, and the shapes and layouts that all of them share.

Shapes: x, y, grad, of_x (B, C, H, W); weight, bias (C,) or None.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_map(x: Tensor) -> Tensor:
    """Empty, of x's shape; the channels of a pixel side by side, as whoever mixes channels next wants them."""
    batch, channels, height, width = x.shape
    return x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """y in x's dtype."""
    y, _ = _normalise(x, eps)
    if weight is not None:
        y = y * weight[:, None, None]
    return new_map(x).copy_(y if bias is None else y + bias[:, None, None])


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by x (x's dtype), weight and bias (float32 or float64), where `needs` says so; None elsewhere."""
    u, rstd = _normalise(x, eps)
    grad = grad.to(u.dtype)
    h = grad if weight is None else grad * weight[:, None, None]
    of_x = rstd * (h - h.mean(1, keepdim=True) - u * (h * u).mean(1, keepdim=True))
    grads = new_map(x).copy_(of_x), (grad * u).sum((0, 2, 3)), grad.sum((0, 2, 3))
    return tuple(g if need else None for g, need in zip(grads, needs))


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(u, 1 / sqrt(var + eps))."""
    x = x.to(wide(x.dtype))
    centred = x - x.mean(1, keepdim=True)
    rstd = 1 / torch.sqrt(centred.square().mean(1, keepdim=True) + eps)
    return centred * rstd, rstd
