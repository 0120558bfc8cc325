"""Cross-entropy of a projection to a vocabulary, in which the logits (T, V) never exist.

The forward pass keeps the log-sum-exp of each token's logits and nothing else; the backward pass makes the logits
again, tile by tile (Wijmans et al. 2024, arXiv 2411.09009, does so too). The other known design (Liger-Kernel, Hsu et
al. 2024, arXiv 2410.10989) makes the gradients in the forward pass, which saves one matrix product in four. It is not
ours, because it holds gradients the size of x and weight from forward to backward and a second copy while they are
scaled (in place would break a graph that is kept), at the moment when a training step holds most; once for each loss
that shares a weight; because gradients that differ by token (reduction="none") come too late for the weight; and
because a forward pass alone would pay for them too.

What the choice costs, forward and backward in float32 on one CPU core, torch 2.14, beside F.cross_entropy(F.linear()):
1.06x the time at T=512, D=96, V=30011, where softmax counts; 1.27x at T=512, D=512, V=8192 and 1.32x at T=2048, D=256,
V=256, where four products stand against three.

Shapes: x (T, D), weight (V, D), bias (V,), target (T,), losses, lse, coefficient (T,).
"""

import importlib
import numbers

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_arch.ops.backend import backend_for
from lean_arch.ops.derivatives import refuse_other_derivatives

ROOMS = {"reference": "reference", "torch": "portable", "triton": "kernels"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias), target, ...)` without the logits, forward and backward.

    Beside the gradients themselves it takes scratch of a constant size, a row of numbers a token, a stripe of weight
    and, for 16-bit x, the gradient of x in float32. The weight's gradient is summed in float32 in any case. The same
    input gives the same bits. There is no second derivative.

    Args:
        x: (T, D), float32, float16, bfloat16 or float64. Sequences (B, N, D) come as `x.flatten(0, 1)`.
        weight: (V, D), of x's dtype. Under autocast x, weight and bias may differ: products are then made in autocast's
            dtype, tile by tile, so that no 16-bit copy of the weight is kept; gradients come in each tensor's own.
        target: (T,) int64, from 0 to V - 1, or `ignore_index`. On a GPU, where looking would wait for it, a target
            out of range makes the loss NaN.
        bias: (V,), of x's dtype or float32.
        ignore_index: tokens with this target cost nothing, and no time on a CPU.
        label_smoothing: share of each target spread over all classes, 0 or more and less than 1.
        reduction: "mean" over the tokens that count (NaN where none does), "sum", or "none" for (T,).

    A CPU without arithmetic for 16-bit inputs multiplies them in float32.

    Returns:
        a number, or (T,) for "none"; float32 (float64 for float64).

    Raises ValueError where arguments do not fit each other.
    """
    refuse_other_derivatives("linear_cross_entropy", x, weight, bias)
    _check(x, weight, target, bias, ignore_index, label_smoothing, reduction)
    losses, _ = torch.ops.lean_arch.linear_cross_entropy(
        x, weight, bias, target, ignore_index, float(label_smoothing), _product_dtype(x), _backend(x.device)
    )
    if reduction == "none":
        return losses
    return losses.sum() / (target != ignore_index).sum() if reduction == "mean" else losses.sum()


def _check(x, weight, target, bias, ignore_index, label_smoothing, reduction):
    for name, tensor, shape in (("x", x, "(T, D)"), ("weight", weight, "(V, D)")):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor {shape}, got {found}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; float32, float16, bfloat16 and float64 work")
    if weight.shape[1] != x.shape[1] or weight.shape[0] == 0:
        raise ValueError(f"weight is {tuple(weight.shape)}; for x {tuple(x.shape)} it takes (V, {x.shape[1]}), V >= 1")
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or target.shape != x.shape[:1]:
        found = f"{target.dtype} {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target must be a tensor of int64 ({x.shape[0]},), got {found}")
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        found = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias must be a tensor ({weight.shape[0]},), got {found}")
    autocast = torch.is_autocast_enabled(x.device.type)
    for name, tensor, more in (("weight", weight, ()), ("bias", bias, (torch.float32,)), ("target", target, ())):
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")
        fits = tensor.dtype in (x.dtype, *more) or tensor is target
        mixed = autocast and torch.float64 not in (x.dtype, tensor.dtype)
        if not (fits or mixed) or (x.dtype == torch.float64 and tensor is bias and tensor.dtype != x.dtype):
            raise ValueError(f"{name} is {tensor.dtype}, but x is {x.dtype}; outside autocast they must be the same")
    if not isinstance(label_smoothing, numbers.Real) or not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing {label_smoothing!r} must be a number, 0 or more and less than 1")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
        raise ValueError(f"ignore_index {ignore_index!r} must be a whole number; one that is no class ignores none")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} does not exist; {', '.join(REDUCTIONS)} do")


def _product_dtype(x: Tensor) -> torch.dtype:
    """What the matrix products multiply: autocast's dtype within it, else x's; float32 where a CPU lacks those."""
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    return dtype if x.device.type != "cpu" or _cpu_multiplies(dtype) else torch.float32


@torch.compiler.assume_constant_result
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


@torch.compiler.assume_constant_result
def _backend(device: torch.device) -> str:
    """Chosen when a function is compiled, not each time it runs."""
    return backend_for(device)


def _room(backend: str):
    return importlib.import_module(f"lean_arch.ops.linear_cross_entropy.{ROOMS[backend]}")


@torch.library.custom_op("lean_arch::linear_cross_entropy", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    counts = target != ignore_index
    if x.is_cpu:
        wrong = target[counts & ((target < 0) | (target >= len(weight)))]
        if len(wrong):
            raise ValueError(
                f"target {wrong[0].item()} is out of range: 0 to {len(weight) - 1} and ignore_index {ignore_index} work"
            )
    kept = _kept(counts)
    some = [x, target] if kept is None else [x[kept], target[kept]]
    with torch.autocast(x.device.type, enabled=False):  # `dtype` has settled that
        smooth = label_smoothing > 0
        lse, hit, total = _room(backend).forward(some[0], weight, bias, some[1], dtype, smooth)
        losses = lse - hit * (1 - label_smoothing)
        if smooth:
            losses -= total * (label_smoothing / len(weight))
    if kept is None:
        return torch.where(counts, losses, 0), lse
    return tuple(values.new_zeros(len(x)).index_copy_(0, kept, values) for values in (losses, lse))


def _kept(counts: Tensor) -> Tensor | None:
    """The tokens that count, where it is worth picking them; on a GPU it is not, for counting them waits for it."""
    return counts.nonzero()[:, 0] if counts.is_cpu and not counts.all() else None


@_forward.register_fake
def _(x, weight, bias, target, ignore_index, label_smoothing, dtype, backend):
    row = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[0], dtype=row), x.new_empty(x.shape[0], dtype=row)


@torch.library.custom_op("lean_arch::linear_cross_entropy_backward", mutates_args=())
def _backward(
    grad: Tensor,
    lse: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    counts = target != ignore_index
    coefficient, kept = torch.where(counts, grad, 0), _kept(counts)
    some = [coefficient, lse, x, target]
    if kept is not None:
        some = [t[kept] for t in some]
    with torch.autocast(x.device.type, enabled=False):
        dx, dw, db = _room(backend).backward(*some[:3], weight, bias, some[3], dtype, label_smoothing, needs)
    if dx is not None and kept is not None:
        dx = torch.zeros_like(x).index_copy_(0, kept, dx)
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in (dx, dw, db))


@_backward.register_fake
def _(grad, lse, x, weight, bias, target, ignore_index, label_smoothing, dtype, backend, needs):
    tensors = (x, weight, bias)
    return tuple(torch.empty_like(t) if need else x.new_empty(0) for t, need in zip(tensors, needs))


def _remember(ctx, inputs, output):
    x, weight, bias, target, *ctx.options = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(lse, x, weight, bias, target)


def _differentiate(ctx, grad, _):
    needs = list(ctx.needs_input_grad[:3])
    gradients = torch.ops.lean_arch.linear_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *(g if need else None for g, need in zip(gradients, needs)), *[None] * 5


_forward.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx, *grads):
    raise RuntimeError("linear_cross_entropy cannot be differentiated twice; F.cross_entropy(F.linear(...)) can")


_backward.register_autograd(_refuse)


@register_flop_formula(torch.ops.lean_arch.linear_cross_entropy)
def _forward_flops(x_shape, weight_shape, *others, out_shape=None) -> int:
    """The logits, as if every token counted."""
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.lean_arch.linear_cross_entropy_backward)
def _backward_flops(grad_shape, lse_shape, x_shape, weight_shape, *others, out_shape=None) -> int:
    """The logits again, and the gradients of x and weight that are needed."""
    need_x, need_weight, _ = others[-1]
    return (1 + need_x + need_weight) * 2 * x_shape[0] * weight_shape[0] * weight_shape[1]
