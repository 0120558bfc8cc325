"""Cases for the attention kernels, and their float64 oracle. Run as a program it prints each case's error as JSON:
Triton's interpreter needs a process that starts with TRITON_INTERPRET=1."""

import functools
import json
import math
from unittest import mock

import torch

from lean_arch.ops.attention import dropout, kernels
from lean_arch.ops.attention.kernels_forward import SELF_SCORE
from lean_arch.ops.attention.problem import Problem
from lean_arch.ops.patterns import (
    Chunks,
    causal,
    dense,
    from_mask,
    global_tokens,
    local,
    random_blocks,
    strided,
)

TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
PATTERNS = {
    "dense": dense(),
    "causal": causal(),
    "local": local(5),
    "local one-sided": local(33, 0),
    "longformer": local(4) | global_tokens(3),
    "causal longformer": (local(4) | global_tokens([3, 30])) & causal(),
    "bigbird": local(9) | global_tokens(2) | random_blocks(1, 8),
    "strided": strided(4) & causal(),
    "far keys only": local(40) & strided(40),
}
SHAPES = {
    "square": (1, 2, 2, 37, 37, 16),
    "grouped": (1, 2, 1, 40, 71, 20),
    "more queries": (2, 1, 1, 50, 20, 8),
    "whole tiles": (1, 1, 1, 64, 96, 64),
}
LSH = {"order": True, "causal_by_order": True, "self_last": True}
CASES = {f"{name}, {shape}": {"pattern": name, "shape": shape} for name in PATTERNS for shape in ("grouped", "square")}
CASES |= {f"dense, {shape}": {"pattern": "dense", "shape": shape} for shape in ("more queries", "whole tiles")}
CASES |= {
    "causal, more queries": {"pattern": "causal", "shape": "more queries"},  # the first 30 queries see nothing
    "local, whole tiles": {"pattern": "local one-sided", "shape": "whole tiles"},
    "from_mask": {"pattern": "drawn", "shape": "grouped"},
    "key lengths": {"pattern": "longformer", "shape": "grouped", "lengths": True},
    "key lengths, more queries": {"pattern": "dense", "shape": "more queries", "lengths": True},
    "segments": {"pattern": "causal", "shape": "grouped", "segments": True},
    "dropout": {"pattern": "causal", "shape": "grouped", "dropout": 0.3},
    "everything": {"pattern": "dense", "shape": "grouped", "lengths": True, "segments": True, "dropout": 0.5},
    "negative scale": {"pattern": "local", "shape": "grouped", "scale": -0.7},
    "zero scale": {"pattern": "causal", "shape": "square", "scale": 0.0},
    "non-contiguous": {"pattern": "causal", "shape": "grouped", "layout": "BNHD"},
    "last dimension strided": {"pattern": "local", "shape": "square", "layout": "BHDN"},
    "far rows": {"pattern": "local", "shape": "square", "layout": "far rows", "dtype": torch.float16},
    "order": {"pattern": "chunks", "shape": "square", "order": True},
    "lsh": {"pattern": "chunks", "shape": "square", **LSH},
    "lsh, dropout, lengths": {"pattern": "chunks", "shape": "square", **LSH, "lengths": True, "dropout": 0.2},
    "lsh, alone": {"pattern": "single", "shape": "square", **LSH},
    "float16": {"pattern": "longformer", "shape": "grouped", "dtype": torch.float16},
    "float16, dropout": {"pattern": "causal", "shape": "square", "dtype": torch.float16, "dropout": 0.25},
}


def oracle(q, k, v, grad_out, grad_lse, problem, allowed, replaced=None):
    """(out, lse, dq, dk, dv) by autograd in float64; `replaced`: scores that are the constant SELF_SCORE."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * problem.scale
    if replaced is not None:
        scores = scores.masked_fill(replaced, SELF_SCORE * math.log(2))
    seen = allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -math.inf).masked_fill(~seen, 0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~seen, 0)
    if problem.dropout_p:
        b, h, nq, nk = scores.shape
        kept = dropout.keep_all(problem.seed, b, h, nq, nk, problem.dropout_p)
        weights = weights * kept / (1 - problem.dropout_p)
    out = weights @ v.repeat_interleave(groups, 1)
    seen = seen[..., 0]
    loss = (out * grad_out.double()).sum() + (lse * grad_lse.double()).masked_fill(~seen, 0).sum()
    return out, lse.masked_fill(~seen, -math.inf), *torch.autograd.grad(loss, (q, k, v))


def laid_out(tensor, layout):
    b, h, n, _ = tensor.shape
    if layout == "BNHD":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "BHDN":
        return tensor.mT.contiguous().mT
    if layout == "far rows":  # the last of them lies beyond 2^31 elements; what is between is never touched
        stride = -(-(2**31) // (b * h * n - 1)) // 16 * 16 + 16
        far = torch.empty(stride * b * h * n, dtype=tensor.dtype, device=tensor.device)
        return far.as_strided(tensor.shape, (stride * h * n, stride * n, stride, 1)).copy_(tensor)
    return tensor


def error(name: str, device="cpu", dtype=None) -> float:
    """Worst relative error of out, lse, dq, dk and dv over the tolerance; infinite where one is NaN."""
    case = {"dtype": torch.float32, "layout": None} | CASES[name]
    dtype = dtype or case["dtype"]
    b, hq, hkv, nq, nk, d = SHAPES[case["shape"]]
    generator = torch.Generator().manual_seed(len(name))
    drawn = torch.rand(nq, nk, generator=generator) < 0.3
    extra = {"drawn": from_mask(drawn), "chunks": Chunks(8, 1), "single": Chunks(1, 0)}
    pattern = (PATTERNS | extra)[case["pattern"]]

    def normal(*size):
        return torch.randn(*size, generator=generator).to(device, dtype)

    q, k, v, grad_out = (normal(b, h, n, d) for h, n in ((hq, nq), (hkv, nk), (hkv, nk), (hq, nq)))
    grad_lse = normal(b, hq, nq).float()
    allowed = pattern.mask(nq, nk).to(device).expand(b, hq, nq, nk)
    options, replaced = {}, None
    if case.get("order"):
        order = torch.stack([torch.randperm(nq, generator=generator) for _ in range(b * hq)]).view(b, hq, nq)
        rank = order.argsort(-1).to(device)
        allowed = allowed.gather(2, rank[..., None].expand_as(allowed)).gather(3, rank[:, :, None].expand_as(allowed))
        options = {"order": order.int().to(device)}
    rows, columns = torch.arange(nq, device=device)[:, None], torch.arange(nk, device=device)
    if case.get("causal_by_order"):
        options |= {"causal_by_order": True, "self_last": True}
        allowed, replaced = allowed & (columns <= rows), columns == rows
    rules = {}
    if case.get("lengths"):
        rules["key_lengths"] = torch.tensor([nk - 19, 0][:b], dtype=torch.int32, device=device)
        allowed = allowed & (columns < rules["key_lengths"][:, None, None, None])
    if case.get("segments"):
        rules["k_segments"] = (columns // 13).int().expand(b, nk)
        rules["q_segments"] = rules["k_segments"][:, nk - nq :]
        allowed = allowed & (rules["q_segments"][:, None, :, None] == rules["k_segments"][:, None, None])
    if case.get("dropout"):
        rules |= {"dropout_p": case["dropout"], "seed": torch.tensor([2**40 + 12345], device=device)}
    problem = Problem(pattern, case.get("scale", 1 / math.sqrt(d)), **rules)
    q, k, v, grad_out = (laid_out(t, case["layout"]) for t in (q, k, v, grad_out))
    makers = (torch.empty_like, torch.Tensor.new_empty)
    if case["layout"] != "far rows":  # filling those would touch all that lies between them
        makers = [functools.partial(poisoned, make) for make in makers]
    like, new = makers
    with mock.patch("torch.empty_like", like), mock.patch("torch.Tensor.new_empty", lambda *a, **o: new(*a, **o)):
        out, lse = kernels.forward(q, k, v, problem, **options)
        delta = (out.float() * grad_out.float()).sum(-1) - grad_lse
        got = out, lse, *kernels.backward(grad_out, delta, q, k, v, lse, problem, **options)
    assert all(g.dtype == dtype for g in (got[0], *got[2:]))
    return (
        max(map(relative_error, got, oracle(q, k, v, grad_out, grad_lse, problem, allowed, replaced)))
        / (TOLERANCES[dtype])
    )


def poisoned(make, *args, **options):
    """What `make` gives, full of NaN, so that what a kernel leaves unwritten shows."""
    tensor = make(*args, **options)
    return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor


def relative_error(got, want) -> float:
    got, none = got.double(), torch.isneginf(want)
    if got.isnan().any() or not torch.equal(torch.isneginf(got), none):
        return math.inf
    got, want = got.masked_fill(none, 0), want.masked_fill(none, 0)
    return ((got - want).norm() / want.norm().clamp_min(1e-3)).item()


if __name__ == "__main__":
    print(json.dumps({name: error(name) for name in CASES}))
