"""Adam for tables of which a step reads few rows: a row that has no gradient rests, and its state is one number.

Adam is by Kingma and Ba 2015 (arXiv 1412.6980). A second moment for each row and no first: the table itself apart,
training takes memory for the rows that were read alone. A momentum would go on to move rows that a batch leaves alone.

Shapes: a parameter (R, V), its gradient dense or sparse; second moment and number of steps (R,) each.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class RowAdam(torch.optim.Optimizer):
    """Moves each row by `lr` times its gradient over the root mean square of the row's gradients.

    Args:
        params: of two dimensions; gradients may be sparse tensors.
        lr: learning rate.
        beta: of the second moment, a mean over the steps that a row takes part in.
        eps: what is added to the root mean square.

    Raises ValueError for a parameter of another shape or an option out of range.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, beta: float = 0.99, eps: float = 1e-10):
        if not lr >= 0:
            raise ValueError(f"lr {lr!r} must be 0 or more")
        if not 0 <= beta < 1:
            raise ValueError(f"beta {beta!r} must be 0 or more and less than 1")
        if not eps > 0:
            raise ValueError(f"eps {eps!r} must be more than 0")
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"params hold a tensor {tuple(parameter.shape)}; tables (R, V) work")

    @torch.no_grad()
    def step(self, closure=None):
        """One step. Returns what `closure` does, where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, *rows_of(parameter.grad), group)
        return loss

    def move(self, parameter: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        state, beta = self.state[parameter], group["beta"]
        if not state:
            zeros = torch.zeros(len(parameter), dtype=torch.float32, device=parameter.device)
            state["steps"], state["second"] = zeros, zeros.clone()
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        steps = state["steps"][rows] + 1
        second = state["second"][rows] * beta + grad.square().mean(1) * (1 - beta)
        state["steps"][rows], state["second"][rows] = steps, second.float()
        scale = (second / (1 - beta**steps)).sqrt() + group["eps"]
        parameter.index_add_(0, rows, (grad / scale[:, None]).to(parameter.dtype), alpha=-group["lr"])


def rows_of(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that have a gradient, and it."""
    if grad.is_sparse:
        grad = grad.coalesce()
        return grad.indices()[0], grad.values()
    rows = (grad != 0).any(1).nonzero()[:, 0]
    return rows, grad[rows]
