"""Which derivatives the operators have: a first one, backward. Others are refused, for they would be silently zero."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_other_derivatives(name: str, *tensors: Tensor) -> None:
    """Raises RuntimeError where a tensor carries a forward-mode derivative or is inside a torch.func transform."""
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (
            torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            or forward_ad.unpack_dual(tensor).tangent is not None
        ):
            raise RuntimeError(
                f"{name} has neither forward-mode derivatives nor torch.func transforms; backward() and "
                "torch.autograd.grad work"
            )
