"""The operator: what it refuses, what it keeps, and what torch.compile, autocast and the counters see of it."""

import gc
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lean_arch.ops import sparse_attention, use
from lean_arch.ops.attention.tiles import compile_tiles
from lean_arch.ops.pattern_text import parse, spell
from lean_arch.ops.patterns import causal, dense, from_mask, global_tokens, local, random_blocks, strided
from tests.ops.attention.oracle import attend, errors


def tensors(batch=2, heads=4, key_heads=2, nq=70, nk=70, size=16, dtype=torch.float32, grad=True):
    torch.manual_seed(0)
    shapes = (batch, heads, nq, size), (batch, key_heads, nk, size), (batch, key_heads, nk, size)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 10)}, "q must be a tensor (batch, heads, length, head size), got (2, 4, 10)"),
        ({"k": None}, "k must be a tensor (batch, heads, length, head size), got NoneType"),
        ({"q": torch.zeros(2, 4, 10, 16, dtype=torch.int64)}, "q is torch.int64; float32"),
        ({"k": torch.zeros(2, 2, 10, 16).half()}, "k is torch.float16 on cpu, but q is torch.float32 on cpu"),
        ({"v": torch.zeros(2, 2, 11, 16)}, "v is (2, 2, 11, 16) but k is (2, 2, 10, 16)"),
        ({"q": torch.zeros(3, 4, 10, 16)}, "batch and head size must be the same"),
        ({"q": torch.zeros(2, 4, 10, 24)}, "batch and head size must be the same"),
        ({"q": torch.zeros(2, 3, 10, 16)}, "q has 3 heads, which is not a multiple of the 2 heads of k"),
        ({"q": torch.zeros(2, 4, 0, 16)}, "there are 0 queries and 10 keys"),
        ({n: torch.zeros(2, 2, 10, 7) for n in "qkv"}, "head size 7 of q is not supported; 8 to 256 are"),
        ({n: torch.zeros(2, 2, 10, 257) for n in "qkv"}, "head size 257 of q is not supported; 8 to 256 are"),
        ({"dropout_p": 1.0}, "dropout_p 1.0 must be a number, 0 or more and less than 1"),
        ({"dropout_p": "a"}, "dropout_p 'a' must be a number"),
        ({"scale": "a"}, "scale 'a' must be a finite number"),
        ({n: torch.zeros(2, 0, 10, 16) for n in "qkv"}, "q has 0 heads and k 0; it takes one or more of both"),
        ({"dropout_p": -0.1}, "dropout_p -0.1 must be"),
        ({"scale": float("nan")}, "scale nan must be a finite number"),
        ({"pattern": from_mask(torch.ones(10, 9, dtype=torch.bool))}, "pattern from_mask is (10, 9), but there are 10"),
        ({"pattern": global_tokens([10])}, "global_tokens position 10 is beyond the 10 keys; 0 to 9 work"),
        ({"key_lengths": torch.tensor([3])}, "key_lengths must be a tensor of integers (2,), got torch.int64 (1,)"),
        ({"key_lengths": torch.tensor([3.0, 4.0])}, "key_lengths must be a tensor of integers (2,)"),
        ({"segment_ids": torch.zeros(2, 9, dtype=torch.int64)}, "segment_ids must be a tensor of integers (2, 10)"),
        ({"segment_ids": (torch.zeros(2, 10).int(),)}, "segment_ids has 1 tensors; one (B, Nk) or a pair"),
        (
            {"q": torch.zeros(2, 4, 12, 16), "segment_ids": torch.zeros(2, 10).int()},
            "segment_ids of 10 keys say nothing of 12 queries; a pair (B, Nq), (B, Nk) does",
        ),
    ],
)
def test_bad_input_is_refused_by_name(change, message, monkeypatch):
    monkeypatch.setattr("lean_arch.ops.attention.op._room", lambda backend: pytest.fail("something was computed"))
    given = {"q": torch.zeros(2, 4, 10, 16), "k": torch.zeros(2, 2, 10, 16), "v": torch.zeros(2, 2, 10, 16)}
    with pytest.raises(ValueError, match=re.escape(message)):
        sparse_attention(**({"pattern": dense()} | given | change))


def test_other_refusals():
    q, k, v = tensors(grad=False)
    with pytest.raises(TypeError, match=r"pattern is a int; .* from_mask"):
        sparse_attention(q, k, v, 256)
    with pytest.raises(ValueError, match="local left -1 must be a whole number, 0 or more"):
        local(-1)
    with pytest.raises(ValueError, match="backend 'cuda' does not exist"), use("cuda"):
        pass


MASK = from_mask(torch.rand(70, 70, generator=torch.Generator().manual_seed(0)) < 0.4)
ALL = [
    local(8) | causal(),
    MASK & global_tokens([3, 5]),
    random_blocks(2, 8, seed=1) & dense(),
    strided(3) | local(2, 0) | global_tokens(4),
]


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("pattern", ALL, ids=str)
def test_compiled(pattern, backend):
    q, k, v = tensors()

    def run(q, k, v):
        out, lse = sparse_attention(q * 2, k, v, pattern, return_lse=True)
        return out.sin().sum() + lse.clamp(min=-9).sum()

    with use(backend):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        got, want = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (compiled, run))
    assert max(errors(got, want)) < 1e-6


def test_compiled_with_everything():
    """Patterns made inside, dropout from the generator, lengths and segments."""
    q, k, v = tensors()
    lengths, ids = torch.tensor([70, 31]), (torch.arange(70) // 20).expand(2, 70)

    def run(q, k, v, lengths, ids):
        pattern = local(9) | global_tokens(2)
        return sparse_attention(q, k, v, pattern, key_lengths=lengths, segment_ids=ids, dropout_p=0.2).square().sum()

    results = []
    for function in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        torch.manual_seed(5)
        results.append(torch.autograd.grad(function(q, k, v, lengths, ids), (q, k, v)))
    assert max(errors(*results)) < 1e-6


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("layout", ["plain", "permuted"])
def test_opcheck(backend, layout):
    q, k, v = tensors(nq=20, nk=33, size=8)
    if layout == "permuted":
        q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v))
    lengths = torch.tensor([33, 5], dtype=torch.int32)
    segments = torch.ones(2, 20, dtype=torch.int32), torch.ones(2, 33, dtype=torch.int32)
    others = lengths, *segments, torch.tensor([77]), spell(local(5) | strided(4)), 0.3, 0.1, backend
    torch.library.opcheck(torch.ops.lean_arch.sparse_attention, (q, k, v, *others))
    q, k, v = (t.detach() for t in (q, k, v))
    out, lse = torch.ops.lean_arch.sparse_attention(q, k, v, *others)
    torch.library.opcheck(
        torch.ops.lean_arch.sparse_attention_backward, (out.cos(), lse.sin(), q, k, v, out, lse, *others)
    )


@pytest.mark.parametrize("pattern", ALL, ids=str)
def test_patterns_come_back_from_their_text(pattern):
    text = spell(pattern)
    assert parse(text) is pattern  # as it is alive
    built = parse(text.replace(" ", ""))  # not known by this text: built anew
    assert torch.equal(built.mask(70), pattern.mask(70))


def test_mask_lives_until_backward_and_no_longer():
    q, k, v = tensors()
    pattern = from_mask(torch.ones(70, 70, dtype=torch.bool).tril())
    out = sparse_attention(q, k, v, pattern)
    want = torch.autograd.grad(attend(q, k, v, pattern.mask(70))[0].sum(), (q, k, v))
    text = spell(pattern)
    del pattern
    gc.collect()
    assert max(errors(torch.autograd.grad(out.sum(), (q, k, v)), want)) < 1e-5
    del out
    compile_tiles.cache_clear()
    gc.collect()
    with pytest.raises(RuntimeError, match=r"pattern from_mask\(.*\) is gone; keep it"):
        parse(text)


def test_keeps_inputs_and_two_results_only():
    q, k, v = tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, lse = sparse_attention(q, k, v, local(8), return_lse=True, dropout_p=0.1)
    # five, and the seed of 8 bytes
    assert sorted(t.numel() for t in kept) == sorted([q.numel(), k.numel(), v.numel(), out.numel(), lse.numel(), 1])


def test_autocast_casts():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse_attention(q, k, v, local(8))
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(g.dtype == torch.float32 for g in grads)
    want = torch.autograd.grad(attend(q, k, v, local(8).mask(70))[0].sum(), (q, k, v))
    assert max(errors(grads, want)) < 0.02


def test_replays_draw_the_same_and_a_second_derivative_is_refused():
    q, k, v = tensors()
    state = torch.get_rng_state()
    first, other = (sparse_attention(q, k, v, dense(), dropout_p=0.5) for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(first, sparse_attention(q, k, v, dense(), dropout_p=0.5))
    assert not torch.equal(first, other)
    (grad,) = torch.autograd.grad(first.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="sparse_attention cannot be differentiated twice"):
        torch.autograd.grad(grad.square().sum(), q)


def test_only_what_needs_a_gradient_gets_one():
    q, k, v = tensors()
    q.requires_grad_(False)
    sparse_attention(q, k, v, causal()).sum().backward()
    assert q.grad is None
    assert k.grad is not None
    _, lse = sparse_attention(q, k, v, causal(), return_lse=True)
    (got,) = torch.autograd.grad(lse.sum(), k)
    (want,) = torch.autograd.grad(attend(q, k, v, causal().mask(70))[1].sum(), k)
    assert max(errors([got], [want])) < 1e-5


def test_flops_are_those_of_the_tiles_that_are_computed():
    def count(pattern, length):
        q, k, v = tensors(1, 2, 1, length, length, 32)
        with FlopCounterMode(display=False) as counter:
            sparse_attention(q, k, v, pattern).sum().backward()
        return counter.get_total_flops()

    pairs = 2 * 32 * 2 * 7  # heads, head size, multiply and add, two products forward and five backward
    assert count(dense(), 256) == pairs * 256**2
    band = count(local(64), 4096)
    assert pairs * 4096 * 129 < band < pairs * 4096 * 129 * 2.5
    assert 1.98 < count(local(64), 8192) / band < 2.03
