"""The loss as a textbook writes it, logits and all: what the other backends are measured against.

Shapes: x (T, D), weight (V, D), bias (V,), target, coefficient, lse, hit, total (T,), logits (T, V).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, dtype: torch.dtype, smooth: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token: the log-sum-exp of its logits, the logit of its target (NaN where there is none), their sum."""
    logits = _logits(x, weight, bias)
    there = (target >= 0) & (target < weight.shape[0])
    hit = logits.gather(1, torch.where(there, target, 0)[:, None])[:, 0]
    return logits.logsumexp(1), torch.where(there, hit, torch.nan), logits.sum(1)


def backward(
    coefficient: Tensor,
    lse: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dtype: torch.dtype,
    smoothing: float,
    needs: list[bool],
) -> list[Tensor | None]:
    """Gradients of sum(coefficient * loss) by x, weight and bias, where `needs` says so; None elsewhere."""
    logits = _logits(x, weight, bias)
    classes = torch.arange(weight.shape[0], device=x.device)
    wanted = (target[:, None] == classes).to(logits.dtype) * (1 - smoothing) + smoothing / len(classes)
    slopes = coefficient[:, None] * ((logits - lse[:, None]).exp() - wanted)
    return [
        (slopes @ weight.to(slopes)).to(x.dtype) if needs[0] else None,
        (slopes.t() @ x.to(slopes)).to(weight.dtype) if needs[1] else None,
        slopes.sum(0).to(bias.dtype) if needs[2] else None,
    ]


def _logits(x, weight, bias):
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
