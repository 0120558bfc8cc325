"""BatchNorm and activation as the paper writes them (Ioffe and Szegedy 2015, arXiv 1502.03167, algorithm 1).

Shapes: x (B, C, H, W); mean, var, weight, bias (C,).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

FUNCTIONS = {
    "identity": lambda u: u,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": lambda u: u * torch.sigmoid(u),
    "gelu": lambda u: u * 0.5 * (1 + torch.erf(u / 2**0.5)),
    "hardswish": lambda u: u * F.relu6(u + 3) / 6,
}


def batch_norm_act(x: Tensor, weight: Tensor, bias: Tensor, eps: float, act: str, mean=None, var=None) -> Tensor:
    """act((x - mean) / sqrt(var + eps) * weight + bias); without `mean` and `var`, those of the batch."""
    if mean is None:
        mean = x.mean((0, 2, 3))
        var = ((x - mean[:, None, None]) ** 2).mean((0, 2, 3))
    normalised = (x - mean[:, None, None]) / torch.sqrt(var + eps)[:, None, None]
    return FUNCTIONS[act](normalised * weight[:, None, None] + bias[:, None, None])
