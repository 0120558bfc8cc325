"""Derivatives the operators do not have end in one sentence, not in zeros."""

import pytest
import torch

from lean_arch.ops import linear_cross_entropy, lsh_attention, sparse_attention
from lean_arch.ops.patterns import causal

X, W, T = torch.randn(6, 8), torch.randn(12, 8), torch.arange(6)
Q, K = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
OPS = {
    "sparse_attention": (lambda q: sparse_attention(q, K, K, causal()), Q),
    "lsh_attention": (lambda q: lsh_attention(q, K, causal=True, bucket_size=2), Q),
    "linear_cross_entropy": (lambda x: linear_cross_entropy(x, W, T), X),
}


@pytest.mark.parametrize("name", OPS)
def test_other_derivatives_are_refused_by_name(name):
    op, x = OPS[name]
    with pytest.raises(RuntimeError, match=f"{name} has neither forward-mode"):
        torch.func.jvp(op, (x,), (x,))
    with pytest.raises(RuntimeError, match=f"{name} has neither forward-mode"):
        torch.func.grad(lambda x: op(x).sum())(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        op(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("name", OPS)
def test_a_second_derivative_is_refused_by_name(name):
    op, x = OPS[name]
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name} cannot be differentiated twice"):
        first.sum().backward()


def test_what_is_no_integer_of_32_bits_is_refused():
    ids = torch.tensor([[5] * 5 + [5 + 2**32] * 4])
    with pytest.raises(ValueError, match=r"segment_ids go from 5 to .* 32 bits"):
        sparse_attention(Q, K, K, causal(), segment_ids=ids)
    with pytest.raises(ValueError, match="key_lengths must be a tensor of integers"):
        sparse_attention(Q, K, K, causal(), key_lengths=torch.tensor([True]))
    with pytest.raises(ValueError, match="key_lengths is on meta"):
        lsh_attention(Q, K, key_lengths=torch.tensor([3], device="meta"))
    far = sparse_attention(Q, K, K, causal(), key_lengths=torch.tensor([2**32 + 3]))
    assert torch.equal(far, sparse_attention(Q, K, K, causal(), key_lengths=torch.tensor([9])))
