"""The activations that follow a normalisation, and their derivatives, in place where PyTorch's kernels can."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

aten = torch.ops.aten

# name -> (in place; the gradient of the input u from (gradient g, u), written into g)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "identity": (lambda u: u, lambda g, u: g),
    "relu": (aten.relu_, lambda g, u: aten.threshold_backward(g, u, 0, grad_input=g)),
    "relu6": (lambda u: aten.hardtanh_(u, 0.0, 6.0), lambda g, u: aten.hardtanh_backward(g, u, 0.0, 6.0, grad_input=g)),
    "silu": (aten.silu_, lambda g, u: aten.silu_backward(g, u, grad_input=g)),
    "gelu": (aten.gelu_, lambda g, u: aten.gelu_backward(g, u, grad_input=g)),
    "hardswish": (aten.hardswish_, lambda g, u: g.copy_(aten.hardswish_backward(g, u))),
}
MODULES = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.Hardswish: "hardswish",
}


def name_of(module: nn.Module) -> str | None:
    """The name of what an activation module computes; None if it is none of these."""
    if getattr(module, "approximate", "none") != "none":
        return None
    return MODULES.get(type(module))
