"""LayerNorm, RMSNorm and GroupNorm with a frozen weight: x, or its normalised numbers in 8 bits, and a number a row.

A row is what is normalised together. The gradient of x needs the normalised rows n and not x:

    grad_x = rstd (g - mean(g) - n mean(g n)),  g = grad weight;  without mean(g) for RMSNorm

So where the result is those (no weight, no bias), it is kept, as the next layer may keep it anyway; and with
`compressed` they are kept as whole numbers from -127 to 127 with a scale a row. They enter the gradient in a projection
alone, of which 8 bits lose little: for normal rows of 768 numbers the gradient is off by 4e-4 of its norm. x itself is
kept in its own dtype, where PyTorch keeps float32 copies under autocast on a GPU and in norms of several operators.

Shapes: x (..., *shape) for LayerNorm and RMSNorm, (B, C, *size) for GroupNorm; weight, bias `shape` or (C,).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.derivatives import once_differentiable, refuse_other_derivatives
from lean_arch.ops.plain_convolution import slices, without_autocast

LARGEST = 127
Call = Callable[[Tensor], Tensor]


class _Rows(NamedTuple):
    """Where rows lie: in the dimensions `dims` of view(x), beside which weight and bias have the shape `affine`."""

    view: Call
    dims: tuple[int, ...]
    affine: tuple[int, ...]
    eps: float
    centred: bool = True

    def statistics(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """(mean, rstd) of rows in float32 or wider; no mean for those that are not centred."""
        if not self.centred:
            return None, rows.square().mean(self.dims, keepdim=True).add_(self.eps).rsqrt_()
        var, mean = torch.var_mean(rows, self.dims, correction=0, keepdim=True)
        return mean, var.add_(self.eps).rsqrt_()


def frozen_layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    compressed: bool = False,
    call: Call | None = None,
) -> Tensor:
    """F.layer_norm (Ba et al. 2016, arXiv 1607.06450), to the bit. The bias may be trained. No second derivative.

    Without weight, bias and `compressed` the result is kept, and autograd refuses it where it was written over.

    Args:
        compressed: keep the normalised numbers in 8 bits; the gradient of x is then nearly exact.
        call: what computes the result from x, where its roundings are not those of F.layer_norm.

    Raises ValueError where weight requires a gradient.
    """
    shape = tuple(normalized_shape)
    call = call or (lambda x: F.layer_norm(x, shape, weight, bias, eps))
    return _norm(x, call, _last(x, shape, eps, True), weight, bias, compressed)


def frozen_layer_norm2d(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, compressed: bool, call: Call
) -> Tensor:
    """`call(x)`, a LayerNorm over the channels of x (B, C, H, W), as `frozen_layer_norm`."""
    return _norm(x, call, _Rows(lambda t: t, (1,), (x.shape[1], 1, 1), eps), weight, bias, compressed)


def frozen_rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    compressed: bool = False,
    call: Call | None = None,
) -> Tensor:
    """F.rms_norm (Zhang and Sennrich 2019, arXiv 1910.07467), as `frozen_layer_norm`."""
    shape = tuple(normalized_shape)
    call = call or (lambda x: F.rms_norm(x, shape, weight, eps))
    eps = torch.finfo(_wide(x.dtype)).eps if eps is None else eps
    return _norm(x, call, _last(x, shape, eps, False), weight, None, compressed)


def frozen_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    compressed: bool = False,
    call: Call | None = None,
) -> Tensor:
    """F.group_norm (Wu and He 2018, arXiv 1803.08494), as `frozen_layer_norm`."""
    call = call or (lambda x: F.group_norm(x, num_groups, weight, bias, eps))
    affine = (num_groups, x.shape[1] // num_groups, *[1] * (x.dim() - 2))
    rows = _Rows(lambda t: t.unflatten(1, affine[:2]), tuple(range(2, x.dim() + 1)), affine, eps)
    return _norm(x, call, rows, weight, bias, compressed)


def _last(x: Tensor, shape: tuple[int, ...], eps: float, centred: bool) -> _Rows:
    # flat where that copies nothing, so that slices can be small
    view = (lambda t: t.reshape(-1, *shape)) if x.is_contiguous() else (lambda t: t)
    return _Rows(view, tuple(range(-len(shape), 0)), shape, eps, centred)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _norm(x, call, rows, weight, bias, compressed):
    refuse_other_derivatives("a norm of frozen weight", x, weight, bias)
    if weight is not None and weight.requires_grad:
        raise ValueError("weight requires a gradient, for which nothing would be kept; PyTorch's norms keep it")
    with torch.no_grad():
        values = call(x)
    return _Norm.apply(x, weight, bias, values, rows, compressed)


class _Norm(torch.autograd.Function):
    """`values`, computed before, as a function of x and bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, values, rows, compressed):
        viewed, wide = rows.view(x), _wide(x.dtype)
        parts, scales = [], []
        codes = torch.empty_like(viewed, dtype=torch.int8) if compressed else None
        with without_autocast(x):
            for part in slices(viewed):
                mean, rstd = rows.statistics(viewed[part].to(wide))
                parts.append((mean, rstd))
                if compressed:
                    codes[part], scale = codes_of(normalised(viewed[part], mean, rstd), rows.dims)
                    scales.append(scale)
        means, rstds = zip(*parts)
        affine_free = weight is None and bias is None and values.dtype == wide
        kept, mean = x, torch.cat(means) if rows.centred else None
        if compressed:
            kept, mean = codes, None
        elif affine_free:
            kept, mean = values, None
        ctx.keeps_x = kept is x
        ctx.save_for_backward(weight, kept, mean, torch.cat(rstds), torch.cat(scales) if compressed else None)
        ctx.rows, ctx.x, ctx.bias = rows, (x.shape, x.dtype), None if bias is None else (bias.shape, bias.dtype)
        return values.detach()  # no view, so that it can be written over

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, kept, mean, rstd, scale = ctx.saved_tensors
        rows, (shape, dtype) = ctx.rows, ctx.x
        wide = rstd.dtype
        kept = kept if scale is not None else rows.view(kept)
        grad = rows.view(grad)
        weight = None if weight is None else weight.to(wide).view(rows.affine)
        of_x = torch.empty_like(kept, dtype=dtype) if ctx.needs_input_grad[0] else None
        of_bias = grad.new_zeros(rows.affine, dtype=wide) if ctx.needs_input_grad[2] else None

        def differentiate(part):  # its own scope: nothing of a slice outlives it
            g = grad[part].to(wide)
            if of_bias is not None:
                of_bias.add_(g.sum_to_size(rows.affine))
            if of_x is None:
                return
            g = g if weight is None else g * weight
            if ctx.keeps_x:
                n = normalised(kept[part], mean if mean is None else mean[part], rstd[part])
            else:
                n = kept[part].to(wide) if scale is None else kept[part] * scale[part]
            along = (g * n).mean(rows.dims, keepdim=True)
            if rows.centred:
                g = g - g.mean(rows.dims, keepdim=True)
            of_x[part] = torch.addcmul(g, n, along, value=-1).mul_(rstd[part])

        with without_autocast(grad):
            for part in slices(kept):
                differentiate(part)
        of_x = None if of_x is None else of_x.reshape(shape)
        of_bias = None if of_bias is None else of_bias.view(ctx.bias[0]).to(ctx.bias[1])
        return of_x, None, of_bias, None, None, None


def normalised(rows: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """In rstd's dtype, a tensor of its own."""
    rows = rows.to(rstd.dtype)
    return rows.mul(rstd) if mean is None else rows.sub(mean).mul_(rstd)


def codes_of(n: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(whole numbers from -127 to 127, scale), whose product is nearly n; written over n."""
    scale = n.abs().amax(dims, keepdim=True).div_(LARGEST).clamp_min_(torch.finfo(n.dtype).tiny)
    return n.div_(scale).round_(), scale
