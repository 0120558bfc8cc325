"""BatchNorm and activation as the paper writes them (Ioffe and Szegedy 2015, arXiv 1502.03167, algorithm 1).

What the other backends are measured against, and what all of them hand from the forward to the backward pass.

Shapes: x (B, C, H, W); mean, rstd, var, weight, bias (C,); pooled_grad (B, C, 1, 1).
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.depthwise.reference import wide

FUNCTIONS = {
    "identity": lambda u: u,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": lambda u: u * torch.sigmoid(u),
    "gelu": lambda u: u * 0.5 * (1 + torch.erf(u / 2**0.5)),
    "hardswish": lambda u: u * F.relu6(u + 3) / 6,
}


@dataclasses.dataclass(frozen=True)
class Norm:
    """What a BatchNorm subtracts and multiplies by, float32 or wider, and the backend that found it.

    var: of frozen statistics; None for those of the batch itself.
    """

    mean: Tensor
    rstd: Tensor
    var: Tensor | None
    eps: float
    act: str
    backend: str

    def scale(self, weight: Tensor | None) -> Tensor:
        return self.rstd if weight is None else self.rstd * weight


def batch_norm_act(x: Tensor, weight: Tensor, bias: Tensor, eps: float, act: str, mean=None, var=None) -> Tensor:
    """act((x - mean) / sqrt(var + eps) * weight + bias); without `mean` and `var`, those of the batch."""
    if mean is None:
        mean = x.mean((0, 2, 3))
        var = ((x - mean[:, None, None]) ** 2).mean((0, 2, 3))
    normalised = (x - mean[:, None, None]) / torch.sqrt(var + eps)[:, None, None]
    return FUNCTIONS[act](normalised * weight[:, None, None] + bias[:, None, None])


def forward(x, weight, bias, running_mean, running_var, batch: bool, momentum: float, eps: float, act: str):
    """(act(norm(x)) in x's dtype, what it subtracted and multiplied by); the running statistics move on."""
    mean, var = running_mean, running_var
    if batch:
        var, mean = torch.var_mean(x.to(wide(x.dtype)), (0, 2, 3), correction=0)
        move(running_mean, running_var, mean, var, x.numel() // x.shape[1], momentum)
    norm = Norm(mean, 1 / torch.sqrt(var.to(wide(x.dtype)) + eps), None if batch else var, eps, act, "reference")
    return activate(x, weight, bias, norm), norm


def move(running_mean, running_var, mean: Tensor, var: Tensor, count: int, momentum: float):
    """The running statistics, if there are any, towards those of `count` numbers a channel."""
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)


def activate(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
    """act(norm(x)) again."""
    u = (x - norm.mean[:, None, None]) * norm.scale(weight)[:, None, None]
    return FUNCTIONS[norm.act](u if bias is None else u + bias[:, None, None]).to(x.dtype)


def backward(
    grad: Tensor | None,
    pooled_grad: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    into: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias), the first written to `into`, which may be `grad`.

    grad: of the activation; pooled_grad: of its mean over each plane; either may be None.
    """
    weight = torch.ones_like(norm.rstd) if weight is None else weight
    bias = torch.zeros_like(norm.rstd) if bias is None else bias
    leaves = [t.detach().to(norm.rstd.dtype).requires_grad_() for t in (x, weight, bias)]
    with torch.enable_grad():
        a = batch_norm_act(*leaves, norm.eps, norm.act, *(() if norm.var is None else (norm.mean, norm.var)))
        pairs = (a, grad), (a.mean((2, 3), keepdim=True), pooled_grad)
    outputs, grads = zip(*((out, g.to(out.dtype)) for out, g in pairs if g is not None))
    of_x, of_weight, of_bias = torch.autograd.grad(outputs, leaves, grads)
    return into.copy_(of_x), of_weight, of_bias
