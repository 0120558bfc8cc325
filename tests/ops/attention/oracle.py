"""Textbook attention in float64, all pairs at once, by autograd: what the backends are held against."""

import math

import torch


def attend(q, k, v, seen, scale=None, kept=None):
    """(out, lse) of q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D); seen: bool, kept: dropout mask over 1 - p or None.

    Rows that see nothing give 0, and -inf for their log-sum-exp.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    some = seen.any(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(~some, 0.0)
    weights = torch.softmax(scores, -1) * some
    lse = torch.logsumexp(scores, -1).masked_fill(~some[..., 0], -math.inf)
    return torch.einsum("bhij,bhjd->bhid", weights if kept is None else weights * kept, v), lse


def results(function, tensors, upstream, upstream_lse):
    """(out, lse, dq, dk, dv) of `function(q, k, v) -> (out, lse)`; lse with 0 in place of -inf."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    out, lse = function(*tensors)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    total = (out * upstream.to(out.dtype)).sum() + (lse * upstream_lse.to(lse.dtype)).sum()
    return out, lse, *torch.autograd.grad(total, tensors)


def errors(got, want):
    """Relative errors; where all should be zero, infinite for anything else."""
    for g, w in zip(got, want, strict=True):
        g, w = g.detach().double(), w.detach().double()
        off = (g - w).norm().item()
        yield math.inf if math.isnan(off) else off / w.norm().item() if w.any() else (math.inf if off else 0.0)
