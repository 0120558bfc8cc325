"""LSH attention by the Triton kernels of sparse attention: a round is one call over its sorted order.

The kernels go through chunks as a pattern of the sorted sequence; what is left to do here is to merge the rounds.

Shapes as in lsh.py.
"""

import math

import torch
from torch import Tensor

from lean_arch.ops.attention import kernels
from lean_arch.ops.attention.kernels_forward import SELF_SCORE
from lean_arch.ops.attention.lsh_portable import normalized
from lean_arch.ops.attention.problem import Problem
from lean_arch.ops.patterns import Chunks

ALONE = SELF_SCORE * math.log(2) / 2  # a log-sum-exp below this is that of a token that saw itself only


def forward(
    qk: Tensor, v: Tensor, order: Tensor, key_lengths: Tensor | None, bucket_size: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out in qk's dtype, lse float32: -inf where a token sees no other, and its out is its own value)."""
    problem, k = _problem(qk, key_lengths, bucket_size), _unit(qk)
    total = qk.new_full(qk.shape[:3], -math.inf, dtype=torch.float32)
    sums = torch.zeros_like(qk, dtype=torch.float32)
    for one in order.unbind(2):
        part, lse = kernels.forward(qk, k, v, problem, order=one, causal_by_order=causal, self_last=True)
        lse.masked_fill_(lse < ALONE, -math.inf)
        merged = torch.logaddexp(total, lse)
        level = merged.masked_fill(merged == -math.inf, 0.0)
        sums.mul_((total - level).exp_()[..., None]).addcmul_(part, (lse - level).exp_()[..., None])
        total = merged
    out = torch.where(_alone(total, key_lengths), v, sums)
    return torch.empty_like(qk).copy_(out), total


def backward(
    grad_out: Tensor,
    delta: Tensor,
    qk: Tensor,
    v: Tensor,
    lse: Tensor,
    order: Tensor,
    key_lengths: Tensor | None,
    bucket_size: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """(dqk, dv), from delta (B, H, N) = sum(grad_out * out, -1)."""
    problem, k = _problem(qk, key_lengths, bucket_size), _unit(qk)
    grad_qk, grad_k, grad_v = (torch.zeros_like(qk, dtype=torch.float32) for _ in range(3))
    for one in order.unbind(2):
        parts = kernels.backward(
            grad_out, delta, qk, k, v, lse, problem, order=one, causal_by_order=causal, self_last=True
        )
        for whole, part in zip((grad_qk, grad_k, grad_v), parts):
            whole += part
    k, inverse = normalized(qk.float())
    grad_qk += (grad_k - k * (grad_k * k).sum(-1, keepdim=True)) * inverse
    grad_v += grad_out.where(_alone(lse, key_lengths), 0.0)
    return torch.empty_like(qk).copy_(grad_qk), torch.empty_like(v).copy_(grad_v)


def _problem(qk, key_lengths, bucket_size) -> Problem:
    return Problem(Chunks(bucket_size, 1), 1 / math.sqrt(qk.shape[3]), key_lengths)


def _unit(qk) -> Tensor:
    return normalized(qk.float())[0].to(qk.dtype)


def _alone(lse, key_lengths) -> Tensor:
    """Which tokens see themselves only: (B, H, N, 1)."""
    alone = lse == -math.inf
    if key_lengths is not None:
        alone &= torch.arange(lse.shape[2], device=lse.device) < key_lengths.view(-1, 1, 1)
    return alone[..., None]
