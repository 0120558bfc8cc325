"""MemoryLayer: the textbook's memory over all n^2 slots, its gradients, and what it takes to train a large table."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_arch.blocks import MemoryLayer
from tests.ruler import allocations


def textbook(layer, x):
    """All scores of all slots, and the best of them."""
    queries = layer.query_norm(layer.query(x).unflatten(-1, (layer.num_heads, -1)))
    first, second = (torch.einsum("...hq,hnq->...hn", q, k) for q, k in zip(queries.chunk(2, -1), layer.keys))
    scores, slots = (first[..., :, None] + second[..., None, :]).flatten(-2).topk(layer.top_k)
    out = (scores.softmax(-1)[..., None] * layer.values[slots]).sum((-2, -3))
    return layer.proj(out * F.silu(layer.gate(x)) if layer.gate is not None else out)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 24), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.booleans(),
    st.sampled_from([(5,), (2, 3), (1, 1, 4)]),
)  # fmt: skip
def test_is_the_textbooks_memory(dim, num_keys, num_heads, top_k, value_dim, gated, shape):
    torch.manual_seed(dim)
    options = {"value_dim": value_dim, "gated": gated, "sparse": False}
    layer = MemoryLayer(dim, num_keys, num_heads, min(top_k, num_keys), **options).double()
    x = torch.randn(*shape, dim, dtype=torch.float64, requires_grad=True)
    tensors = [x, *layer.parameters()]
    got, want = layer(x), textbook(layer, x)
    assert got.shape == x.shape
    torch.testing.assert_close(got, want)
    for g, w in zip(*(torch.autograd.grad(out.square().sum(), tensors) for out in (got, want))):
        torch.testing.assert_close(g, w)


def test_reads_are_the_slots_and_weights_of_the_sum():
    layer = MemoryLayer(8, 5, 2, 3)
    x = torch.randn(4, 6, 8)
    index, weights = layer.read(x)
    assert index.shape == weights.shape == (4, 6, 2 * 3)
    assert 0 <= index.min() <= index.max() < 25
    torch.testing.assert_close(weights.unflatten(-1, (2, 3)).sum(-1), torch.ones(4, 6, 2))
    torch.testing.assert_close(layer.recall(index, weights), (weights[..., None] * layer.values[index]).sum(-2))


def test_values_of_a_large_table_get_a_compact_gradient():
    layer = MemoryLayer(16, 256, 1, 4)
    layer(torch.randn(8, 16)).square().sum().backward()
    assert layer.values.grad.is_sparse
    read = layer.values.grad.coalesce().indices()[0]
    assert len(read) <= 8 * 4
    assert layer.keys.grad.shape == layer.keys.shape
    optimizer = torch.optim.SparseAdam([layer.values], 1e-2)
    before = layer.values.detach().clone()
    optimizer.step()
    moved = (layer.values != before).any(1)
    assert torch.equal(moved.nonzero()[:, 0], read)


def test_no_allocation_of_the_tables_size():
    layer = MemoryLayer(16, 512, 2, 4)
    x = torch.randn(32, 16)
    assert max(allocations(lambda: layer(x).square().sum().backward())) < layer.values.nbytes / 50


def test_learns_what_a_linear_layer_cannot():
    """Labels of random tokens."""
    torch.manual_seed(0)
    layer, x, labels = MemoryLayer(16, 16, 2, 4, sparse=False), torch.randn(256, 16), torch.randint(4, (256,))
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(layer(x), labels).backward()
        optimizer.step()
    assert (layer(x)[:, :4].argmax(1) == labels).float().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_16_bits(dtype):
    torch.manual_seed(0)
    layer, x = MemoryLayer(16, 8, 2, 3), torch.randn(5, 16)
    with torch.autocast("cpu", dtype):
        out = layer(x)
    assert out.dtype == dtype
    out.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    assert layer.to(dtype)(x.to(dtype)).dtype == dtype


def test_dropout_acts_in_training_only():
    layer, x = MemoryLayer(64, 4, 1, 2, dropout=0.5), torch.randn(50, 64)
    assert 0.4 < (layer(x) == 0).float().mean() < 0.6
    assert (layer.eval()(x) != 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_keys": 0}, "num_keys 0 must be"),
        ({"top_k": 9}, "top_k 9 is more than num_keys 8"),
        ({"key_dim": 7}, "key_dim 7 is cut in two halves"),
        ({"value_dim": 0}, "value_dim 0 must be"),
        ({"dropout": 1.0}, "dropout 1.0 must be"),
    ],
)
def test_bad_sizes_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        MemoryLayer(**{"dim": 16, "num_keys": 8, "num_heads": 2, "top_k": 4} | change)
