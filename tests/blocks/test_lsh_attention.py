"""LSHAttention against projections and full shared-QK attention in float64, and where its randomness comes from."""

import copy
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lean_arch.blocks import LSHAttention, ReversibleSequence
from lean_arch.ops.attention import lsh
from lean_arch.registry import ATTENTION
from tests.blocks.stacks import assert_reversible_equals_stored, feed_forward
from tests.ruler import peak_bytes


def oracle(layer, x, lengths):
    """Every token sees all others (before it), or itself where there is none: what LSH is in one chunk."""
    batch, length, _ = x.shape
    sizes = batch, length, layer.num_heads, -1
    qk, v = ((x @ part.weight.T).view(sizes).transpose(1, 2) for part in (layer.qk, layer.v))
    keys = qk / qk.norm(dim=-1, keepdim=True)
    allowed = torch.ones(batch, 1, length, length, dtype=torch.bool)
    allowed = allowed.tril() if layer.causal else allowed
    allowed = allowed & (torch.arange(length) < lengths[:, None])[:, None, None]
    itself = torch.eye(length, dtype=torch.bool)
    others = allowed & ~itself
    allowed = torch.where(others.any(-1, keepdim=True), others, allowed & itself)
    scores = (qk @ keys.mT / math.sqrt(layer.head_dim)).masked_fill(~allowed, -math.inf)
    weights = torch.where(allowed.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    return (weights @ v).transpose(1, 2).flatten(2) @ layer.proj.weight.T + layer.proj.bias


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_hashes", "lengths"), [(1, None), (3, [37, 11])])
def test_values_and_gradients_in_one_chunk(causal, n_hashes, lengths):
    torch.manual_seed(0)
    layer = LSHAttention(48, 4, n_hashes, bucket_size=20, causal=causal)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(2, 37, 48)
    lengths = None if lengths is None else torch.tensor(lengths)
    got_in, want_in = x.clone().requires_grad_(), x.double().requires_grad_()
    got = layer(got_in, key_lengths=lengths)
    want = oracle(exact, want_in, torch.tensor([37, 37]) if lengths is None else lengths)
    upstream = torch.randn_like(got)
    found = torch.autograd.grad(got, [got_in, *layer.parameters()], upstream)
    wanted = torch.autograd.grad(want, [want_in, *exact.parameters()], upstream.double())
    for a, b in zip((got, *found), (want, *wanted), strict=True):
        assert (a.double() - b).norm() <= 5e-6 * b.norm()


def test_options_reach_the_operator(monkeypatch):
    seen = {}
    monkeypatch.setattr("lean_arch.blocks.lsh_attention.lsh_attention", lambda qk, v, **o: seen.update(o) or v)
    lengths = torch.tensor([5])
    LSHAttention(16, 2, 3, 7, causal=True)(torch.randn(1, 9, 16), lengths)
    assert seen == {"n_hashes": 3, "bucket_size": 7, "causal": True, "key_lengths": lengths, "generator": None}


def test_no_gradient_comes_from_a_later_token():
    torch.manual_seed(0)
    layer = LSHAttention(32, 2, 2, 8, causal=True)
    x = torch.randn(1, 100, 32, requires_grad=True)
    layer(x)[0, 60].sum().backward()
    touched = x.grad[0].abs().sum(-1).nonzero()[:, 0]
    assert touched.max() == 60
    assert len(touched) > 8


def test_training_hashes_anew_and_evaluation_always_alike():
    torch.manual_seed(0)
    layer = LSHAttention(32, 2, 1, 8)
    x = torch.randn(2, 100, 32)
    assert not torch.equal(layer(x), layer(x))
    torch.manual_seed(5)
    first = layer(x)
    torch.manual_seed(5)
    assert torch.equal(first, layer(x))
    layer.eval()
    before = torch.get_rng_state()
    scored = layer(x)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(7)
    assert torch.equal(scored, layer(x))
    torch.testing.assert_close(layer(x[:1]), scored[:1], rtol=1e-5, atol=1e-5)  # whatever else is in the batch


def hashings(monkeypatch):
    """The orders that are sorted from now on, as they come."""
    orders, sort = [], lsh.sort_tokens
    monkeypatch.setattr(lsh, "sort_tokens", lambda *a: orders.append(sort(*a)) or orders[-1])
    return orders


def test_checkpointing_hashes_again_as_it_did(monkeypatch):
    torch.manual_seed(0)
    layer = LSHAttention(32, 2, 2, 8, causal=True)
    x = torch.randn(1, 100, 32, requires_grad=True)
    orders = hashings(monkeypatch)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(orders) == 2
    assert torch.equal(*orders)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_reversible_stack_hashes_again_as_it_did(chunks, monkeypatch):
    torch.manual_seed(0)
    pairs = [(LSHAttention(16, 2, 2, 8, causal=True), feed_forward(16, p=0.3)) for _ in range(3)]
    model = ReversibleSequence(pairs, chunks=chunks)
    x = torch.randn(2, 100, 16, requires_grad=True)
    assert_reversible_equals_stored(model, x, x)
    orders = hashings(monkeypatch)
    model.reversible = True
    sum(model((x, x))).sum().backward()
    assert len(orders) == 6 * chunks
    there, back = orders[: 3 * chunks], orders[3 * chunks :]
    for one, again in zip(there, reversed(back), strict=True):
        assert torch.equal(one, again)


def test_memory_is_linear_in_the_length():
    layer = LSHAttention(32, 2, 2, 16, causal=True)

    def peak(length):
        x = torch.randn(1, length, 32, requires_grad=True)
        return peak_bytes(lambda: layer(x).square().mean().backward())

    assert peak(8192) <= 4.1 * peak(2048)


def test_it_has_a_name():
    assert ATTENTION.get("lsh") is LSHAttention


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": 30}, "dim 30 is not a multiple of num_heads 4"),
        ({"num_heads": 0}, "num_heads 0 must be a whole number, 1 or more"),
        ({"dim": 16}, "4 heads of 4 channels; 8 to 256 work"),
        ({"n_hashes": 0}, "n_hashes 0 must be a whole number, 1 or more"),
        ({"bucket_size": 2.5}, "bucket_size 2.5 must be a whole number, 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LSHAttention(**{"dim": 32, "num_heads": 4} | options)
