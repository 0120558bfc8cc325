"""LayerNorm and a two-layer perceptron over channels, some rows at a time, from its input alone.

What ConvNeXt (Liu et al. 2022, arXiv 2201.03545) and transformers have behind the mixing of tokens. A textbook layer
keeps the normalised input, the hidden layer before and after its activation; here each lives for one slice of rows, and
the backward pass computes it again: the first layer's product runs twice, the second's does not.

Shapes: x (R, C), norm_weight, norm_bias (C,), weight1 (F, C), bias1 (F,), weight2 (O, F), bias2, gamma (O,),
result (R, O).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.derivatives import once_differentiable
from lean_arch.ops.norm_act.activations import ACTIVATIONS
from lean_arch.ops.plain_convolution import arithmetic, result_dtype, slices, without_autocast

_norm = torch.ops.aten.native_layer_norm
_norm_backward = torch.ops.aten.native_layer_norm_backward


def norm_mlp(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    gamma: Tensor | None = None,
    eps: float = 1e-6,
    act: str = "gelu",
    keep_hidden: bool = False,
) -> Tensor:
    """linear2(act(linear1(layer_norm(x)))) * gamma, (R, O), in autocast's dtype where it is on.

    act: a name of `lean_arch.ops.norm_act.activations.ACTIVATIONS`. keep_hidden: keep linear1's result too, so that no
    product runs twice.
    """
    return _NormMlp.apply(x, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, eps, act, keep_hidden)


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, eps, act, keep_hidden):
        dtype = result_dtype(x, x.dtype)
        ctx.how = dtype, eps, act
        out = x.new_empty(x.shape[0], weight2.shape[0], dtype=dtype)
        hidden = x.new_empty(x.shape[0], weight1.shape[0], dtype=dtype) if keep_hidden else None
        with without_autocast(x):
            wide = arithmetic(dtype, x.device)
            first = weight1.to(wide), bias1.to(wide)
            second = [p.to(wide) for p in _scaled(weight2, bias2, gamma)]
            for part in slices(x, width=weight1.shape[0]):
                h = F.linear(_normalise(x[part], norm_weight, norm_bias, eps)[0].to(wide), *first)
                if keep_hidden:
                    hidden[part] = h
                out[part] = F.linear(ACTIVATIONS[act][0](h), *second)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, hidden)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, hidden = ctx.saved_tensors
        dtype, eps, act = ctx.how
        wide = arithmetic(dtype, x.device)
        of_x = torch.empty_like(x)
        sums = [torch.zeros_like(p) for p in (norm_weight, norm_bias, weight1, bias1, weight2, bias2)]
        with without_autocast(x):
            w1, b1, w2 = (p.to(wide) for p in (weight1, bias1, _scaled(weight2, bias2, gamma)[0]))

            def differentiate(part: slice):  # its own scope: nothing of a slice outlives it
                u, mean, rstd = _normalise(x[part], norm_weight, norm_bias, eps)
                u = u.to(wide)
                h = F.linear(u, w1, b1) if hidden is None else hidden[part].to(wide)
                g = grad[part].to(wide)
                a = ACTIVATIONS[act][0](h.clone())
                sums[4] += g.mT @ a
                sums[5] += g.sum(0)
                del a
                g = ACTIVATIONS[act][1](g @ w2, h)
                del h
                sums[2] += g.mT @ u
                sums[3] += g.sum(0)
                del u
                rows = x[part].to(norm_weight.dtype)
                g, of_weight, of_bias = _norm_backward(
                    (g @ w1).to(rows.dtype), rows, rows.shape[1:], mean, rstd, norm_weight, norm_bias, [True] * 3
                )
                sums[0] += of_weight
                sums[1] += of_bias
                of_x[part] = g

            for part in slices(x, width=weight1.shape[0]):
                differentiate(part)
        of_gamma = None
        if gamma is not None:
            of_gamma = torch.linalg.vecdot(sums[4], weight2).add_(sums[5] * bias2)
            sums[4].mul_(gamma[:, None])
            sums[5].mul_(gamma)
        return of_x, *sums, of_gamma, None, None, None


def _scaled(weight: Tensor, bias: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor]:
    """The layer with LayerScale folded in: so gamma's gradient needs the layer's weight, not its result."""
    return (weight, bias) if gamma is None else (weight * gamma[:, None], bias * gamma)


def _normalise(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(layer_norm(x), mean, rstd) in the dtype of the weight."""
    return _norm(x.to(weight.dtype), x.shape[1:], weight, bias, eps)
