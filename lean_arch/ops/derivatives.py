"""Which derivatives the operators have: a first one, backward. Others are refused, for they would be silently zero."""

import functools

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


def once_differentiable(backward):
    """For a Function's `backward`: its gradients refuse to be differentiated again, with a RuntimeError.

    PyTorch's decorator of this name leaves them constants where the gradient that comes in is one, as that of
    `block(x).sum()` is: a gradient penalty would be silently without effect.
    """

    @functools.wraps(backward)
    def run(ctx, *grads):
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # nobody asked for a graph of the gradients
            return found
        message = b"what keeps less for its backward pass cannot be differentiated twice; its twin of torch.nn can"
        refuse = torch._C._functions.DelayedError(message, len(found))
        return refuse(*(None if g is None else g.detach().requires_grad_() for g in found))

    return run
