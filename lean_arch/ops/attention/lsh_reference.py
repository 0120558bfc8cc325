"""LSH attention as the textbook has it, with all N x N scores: to read, and to hold the other backends against.

Reformer (Kitaev et al. 2020, arXiv 2001.04451), section 2, equations 2 to 5: softmax over the union of what the rounds
see, a key as often as it is seen; the score of a token with itself is lowered by 1e5.

Shapes as in lsh.py.
"""

import math

import torch
from torch import Tensor

from lean_arch.ops.attention.problem import arithmetic

PENALTY = 1e5


def forward(
    qk: Tensor, v: Tensor, order: Tensor, key_lengths: Tensor | None, bucket_size: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out in qk's dtype, lse of each token's scores with others: -inf where it sees none)."""
    scores = _scores(qk, times_seen(order, key_lengths, bucket_size, causal))
    out = _softmax(scores) @ v.double()
    others = scores.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool, device=qk.device), -math.inf)
    return torch.empty_like(qk).copy_(out), others.logsumexp(-1).to(arithmetic(qk.dtype))


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
    """(dqk, dv): through the softmax, and through the keys' length."""
    weights = _softmax(_scores(qk, times_seen(order, key_lengths, bucket_size, causal)))
    x, v, grad_out = qk.double(), v.double(), grad_out.double()
    length, k, scale = x.norm(dim=-1, keepdim=True), _keys(x), 1 / math.sqrt(x.shape[-1])
    slopes = grad_out @ v.mT
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdim=True))
    grad_q, grad_k = scale * slopes @ k, scale * slopes.mT @ x
    grad_k = ((grad_k - k * (k * grad_k).sum(-1, keepdim=True)) / length).masked_fill(length == 0, 0.0)
    return torch.empty_like(qk).copy_(grad_q + grad_k), torch.empty_like(qk).copy_(weights.mT @ grad_out)


def times_seen(order: Tensor, key_lengths: Tensor | None, bucket_size: int, causal: bool) -> Tensor:
    """In how many rounds a query sees a key: (B, H, N, N)."""
    length = order.shape[-1]
    place = order.argsort(-1)  # of each position in the sorted sequence
    chunk = place // bucket_size
    step = chunk[..., :, None] - chunk[..., None, :]
    count = ((step == 0) | (step == 1)).sum(2)
    position = torch.arange(length, device=order.device)
    if causal:
        count = count * (position <= position[:, None])
    if key_lengths is not None:
        count = count * (position < key_lengths.view(-1, 1, 1, 1))
    return count


def _keys(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _scores(qk: Tensor, count: Tensor) -> Tensor:
    """(B, H, N, N) with log(count) in them, which makes them count so often; -inf where a key is not seen."""
    x = qk.double()
    scores = x @ _keys(x).mT / math.sqrt(x.shape[-1]) + count.double().log()
    return scores - PENALTY * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)


def _softmax(scores: Tensor) -> Tensor:
    """Of the last dimension; a row that sees nothing has weights of 0."""
    return torch.softmax(scores, -1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
