"""Sparse attention as the textbook has it, with all Nq x Nk scores: to read, and to hold the other backends against.

    S = scale Q K^T over the pairs that count, P = softmax(S), O = (P Z / (1 - p)) V with the dropout mask Z

Backward, as in FlashAttention (Dao et al. 2022, arXiv 2205.14135, section B.2), P comes from the scores and their
log-sum-exp again, and delta = sum(dO O, -1) stands for what the softmax's own sum takes back.

Shapes: q (B, Hq, Nq, D); k, v (B, Hkv, Nk, D); out as q; lse and delta (B, Hq, Nq).
"""

import math

import torch
from torch import Tensor

from lean_arch.ops.attention.dropout import keep_all
from lean_arch.ops.attention.problem import Problem, arithmetic


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, lse in float32 or float64: -inf where a row sees nothing, whose out is 0)."""
    scores, _, v = _scores(q, k, v, problem)
    lse = scores.logsumexp(-1)
    out = _drop(_weights(scores, lse), problem) @ v
    return torch.empty_like(q).copy_(out), lse


def backward(
    grad_out: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    scores, wide_k, wide_v = _scores(q, k, v, problem)
    grad_out = grad_out.to(scores.dtype)
    weights = _weights(scores, lse)
    grad_v = _drop(weights, problem).mT @ grad_out
    grad_scores = weights * (_drop(grad_out @ wide_v.mT, problem) - delta[..., None])
    grad_q = grad_scores @ wide_k * problem.scale
    grad_k = grad_scores.mT @ q.to(scores.dtype) * problem.scale
    grad_k, grad_v = (g.unflatten(1, (k.shape[1], -1)).sum(2) for g in (grad_k, grad_v))
    return tuple(torch.empty_like(t).copy_(g) for t, g in ((q, grad_q), (k, grad_k), (v, grad_v)))


def allowed(problem: Problem, nq: int, nk: int, device: torch.device) -> Tensor:
    """Which pairs count: bool (B or 1, 1, Nq, Nk)."""
    seen = problem.pattern.mask(nq, nk).to(device)[None, None]
    if problem.key_lengths is not None:
        seen = seen & (torch.arange(nk, device=device) < problem.key_lengths.view(-1, 1, 1, 1))
    if problem.q_segments is not None:
        seen = seen & (problem.q_segments[:, None, :, None] == problem.k_segments[:, None, None, :])
    return seen


def _scores(q, k, v, problem) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, -inf where a pair does not count; keys and values, a copy for each query head)."""
    groups, dtype = q.shape[1] // k.shape[1], arithmetic(q.dtype)
    k, v = (t.to(dtype).repeat_interleave(groups, 1) for t in (k, v))
    scores = q.to(dtype) @ k.mT * problem.scale
    return scores.masked_fill(~allowed(problem, q.shape[2], k.shape[2], q.device), -math.inf), k, v


def _weights(scores, lse) -> Tensor:
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])


def _drop(x, problem) -> Tensor:
    if problem.dropout_p == 0:
        return x
    return x * keep_all(problem.seed, *x.shape, problem.dropout_p) / (1 - problem.dropout_p)
