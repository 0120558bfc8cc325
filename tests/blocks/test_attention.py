"""SparseAttention against projections, rotary positions and attention written out in float64."""

import copy
import math

import pytest
import torch
from torch import nn

from lean_arch.blocks import KeyValues, SparseAttention
from lean_arch.blocks.rotary import rotary
from lean_arch.ops.patterns import causal, dense, global_tokens, local


def turned(x):
    """Rotary positions as complex numbers: channel i and i + D/2 are the two parts of one."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** -(torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), -1)


def oracle(layer, x, rotate):
    b, n, _ = x.shape
    h, hkv, d = layer.num_heads, layer.num_kv_heads, layer.head_dim
    qkv = (x @ layer.qkv.weight.T + (0 if layer.qkv.bias is None else layer.qkv.bias)).view(b, n, h + 2 * hkv, d)
    q, k, v = (qkv[:, :, a:z].transpose(1, 2) for a, z in ((0, h), (h, h + hkv), (h + hkv, h + 2 * hkv)))
    if rotate:
        q, k = turned(q), turned(k)
    k, v = k.repeat_interleave(h // hkv, 1), v.repeat_interleave(h // hkv, 1)
    scores = (q @ k.mT / math.sqrt(d)).masked_fill(~layer.pattern.mask(n), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ layer.proj.weight.T + layer.proj.bias


@pytest.mark.parametrize(
    ("pattern", "kv", "rotate", "bias"),
    [
        (local(5, 0), 2, True, False),
        (causal(), 1, True, True),
        (local(3) | global_tokens(2), None, False, True),
        (dense(), 4, True, False),
    ],
)
def test_values_and_gradients(pattern, kv, rotate, bias):
    torch.manual_seed(0)
    layer = SparseAttention(48, 4, pattern, kv, rotary=rotate, qkv_bias=bias)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(2, 37, 48)
    got_in, want_in = x.clone().requires_grad_(), x.double().requires_grad_()
    got, want = layer(got_in), oracle(exact, want_in, rotate)
    upstream = torch.randn_like(got)
    found = torch.autograd.grad(got, [got_in, *layer.parameters()], upstream)
    wanted = torch.autograd.grad(want, [want_in, *exact.parameters()], upstream.double())
    for a, b in zip((got, *found), (want, *wanted), strict=True):
        assert (a.double() - b).norm() <= 2e-6 * b.norm()


def test_rotary_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    scores = [(rotary(q, i) * rotary(k, j)).sum() for i, j in ((5, 3), (105, 103), (70_002, 70_000))]
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scores[2], scores[0], rtol=1e-5, atol=1e-5)
    assert rotary(torch.ones(1, 1, 3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("pattern", [causal(), local(6, 0), local(0, 0)])
def test_a_cache_gives_what_the_whole_sequence_gives(pattern):
    torch.manual_seed(0)
    layer = SparseAttention(32, 4, pattern, 2).double()
    x = torch.randn(3, 40, 32, dtype=torch.float64)
    cache, parts = KeyValues(), []
    for part in x.split([17, 1, 1, 5, 16], 1):
        parts.append(layer(part, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-6, atol=1e-7)
    assert cache.seen == 40
    assert cache.k.shape[2] == (40 if pattern == causal() else pattern.left)


def test_padding_and_packing_reach_the_operator():
    torch.manual_seed(0)
    layer = SparseAttention(32, 2, local(4))
    x = torch.randn(2, 20, 32)
    lengths = torch.tensor([20, 11])
    torch.testing.assert_close(layer(x, key_lengths=lengths)[1, :11], layer(x[1:, :11])[0])
    segments = torch.tensor([0] * 8 + [1] * 12).expand(2, 20)
    plain = SparseAttention(32, 2, local(4), rotary=False)
    torch.testing.assert_close(plain(x, segment_ids=segments)[:, 8:], plain(x[:, 8:]))


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    layer = SparseAttention(32, 2, causal(), dropout=0.5)
    x = torch.randn(1, 20, 32)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dim": 30}, ValueError, "dim 30 is not a multiple of num_heads 4"),
        ({"num_kv_heads": 3}, ValueError, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_heads": 0}, ValueError, "num_heads 0 must be a whole number, 1 or more"),
        ({"num_heads": -4}, ValueError, "num_heads -4 must be a whole number, 1 or more"),
        ({"num_heads": 4.0}, ValueError, "num_heads 4.0 must be a whole number"),
        ({"dim": 0}, ValueError, "dim 0 must be a whole number, 1 or more"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads 0 must be a whole number, 1 or more"),
        ({"dim": 8, "num_heads": 2}, ValueError, "dim 8 gives 2 heads of 4 channels; 8 to 256 work"),
        ({"dim": 1032}, ValueError, "dim 1032 gives 4 heads of 258 channels; 8 to 256 work"),
        ({"dim": 36}, ValueError, "heads of 9 channels; rotary needs an even number"),
        ({"dropout": 1.0}, ValueError, "dropout 1.0 must be a share, 0 or more and less than 1"),
        ({"dropout": "half"}, ValueError, "dropout 'half' must be a share"),
        ({"pattern": 256}, TypeError, "pattern 256 is no attention pattern"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        SparseAttention(**{"dim": 32, "num_heads": 4, "pattern": causal()} | options)


def test_a_cache_needs_a_causal_band():
    with pytest.raises(ValueError, match=r"local\(4, 4\) cannot go with a cache"):
        SparseAttention(32, 4, local(4))(torch.randn(1, 3, 32), cache=KeyValues())


def test_frozen_projections_leave_the_input_gradient():
    layer = SparseAttention(32, 4, causal()).requires_grad_(False)
    x = torch.randn(1, 9, 32, requires_grad=True)
    nn.functional.mse_loss(layer(x), torch.zeros(1, 9, 32)).backward()
    assert x.grad.abs().sum() > 0
