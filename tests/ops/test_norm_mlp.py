"""LayerNorm and a perceptron: values and every gradient against the layers in float64, in slices."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_arch.ops import norm_mlp as room
from lean_arch.ops import plain_convolution
from lean_arch.ops.norm_act import reference
from lean_arch.ops.norm_mlp import norm_mlp
from tests.ruler import peak_bytes

NAMES = "x", "norm_weight", "norm_bias", "weight1", "bias1", "weight2", "bias2", "gamma"


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Several, and a ragged one, at the sizes of these tests."""
    monkeypatch.setattr(room, "slices", lambda x, width: plain_convolution.slices(x, elements=100, width=width))


def problem(rows=23, channels=5, hidden=13, outputs=5, dtype=torch.float64, gamma=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, channels), (channels,), (channels,), (hidden, channels), (hidden,), (outputs, hidden), (outputs,)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in (*shapes, (outputs,))]
    tensors[0] = tensors[0] * 3 + 1
    return [t.requires_grad_() for t in tensors[: 7 + gamma]]


def textbook(x, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma=None, eps=1e-6, act="gelu"):
    centred = x - x.mean(1, keepdim=True)
    u = centred / torch.sqrt(centred.square().mean(1, keepdim=True) + eps) * norm_weight + norm_bias
    y = F.linear(reference.FUNCTIONS[act](F.linear(u, weight1, bias1)), weight2, bias2)
    return y if gamma is None else y * gamma


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def compare(tensors, tolerance, **options):
    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    want = textbook(*doubles, **{k: v for k, v in options.items() if k != "keep_hidden"})
    got = norm_mlp(*tensors, **options)
    assert error(got, want) <= tolerance
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    needed = [i for i, t in enumerate(tensors) if t.requires_grad]
    grads = torch.autograd.grad(got, [tensors[i] for i in needed], upstream.to(got.dtype))
    wanted = torch.autograd.grad(want, [doubles[i] for i in needed], upstream)
    for i, g, w in zip(needed, grads, wanted):
        assert (g.shape, g.dtype) == (tensors[i].shape, tensors[i].dtype)
        assert error(g, w) <= tolerance, NAMES[i]


@pytest.mark.parametrize("gamma", [True, False])
@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.parametrize("act", reference.FUNCTIONS)
def test_values_and_gradients(act, keep_hidden, gamma):
    compare(problem(gamma=gamma), 1e-13, act=act, keep_hidden=keep_hidden, eps=1e-3)
    compare(problem(outputs=7, gamma=gamma, dtype=torch.float32), 1e-5, act=act, keep_hidden=keep_hidden)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(3, 9), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.booleans())
def test_any_shape(rows, channels, hidden, outputs, gamma, keep_hidden):
    compare(problem(rows, channels, hidden, outputs, gamma=gamma), 1e-9, keep_hidden=keep_hidden, eps=0.1)


@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.parametrize("number", range(8))
def test_any_of_them_frozen(number, keep_hidden):
    tensors = problem()
    tensors[number].requires_grad_(False)
    compare(tensors, 1e-13, keep_hidden=keep_hidden)
    alone = problem()
    for other in alone[:number] + alone[number + 1 :]:
        other.requires_grad_(False)
    compare(alone, 1e-13, keep_hidden=keep_hidden)


def test_no_rows():
    tensors = problem(rows=0)
    out = norm_mlp(*tensors)
    assert out.shape == (0, 5)
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("keep_hidden", [True, False])
def test_a_second_backward_pass_gives_the_same(keep_hidden):
    tensors = problem()
    loss = norm_mlp(*tensors, keep_hidden=keep_hidden).square().sum()
    one, two = (torch.autograd.grad(loss, tensors, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, one, two))
    (grad,) = torch.autograd.grad(loss, tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("gamma", [True, False])
@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_as_near_as_the_textbook(dtype, keep_hidden, gamma):
    tensors = problem(rows=61, dtype=torch.float32, gamma=gamma)
    tensors[0] = tensors[0].detach().to(dtype).requires_grad_()
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    exact = textbook(*doubles)
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = exact, *torch.autograd.grad(exact, doubles, upstream.double())

    def layers(x, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma=None):
        u = F.layer_norm(x.to(norm_weight.dtype), x.shape[1:], norm_weight, norm_bias, 1e-6)
        y = F.linear(F.gelu(F.linear(u, weight1, bias1)), weight2, bias2)
        return y if gamma is None else y * gamma

    errors = []
    for run in (lambda *t: norm_mlp(*t, keep_hidden=keep_hidden), layers):
        with torch.autocast("cpu", torch.bfloat16):
            out = run(*tensors)
        assert out.dtype == torch.bfloat16 or run is layers
        grads = torch.autograd.grad(out, tensors, upstream.to(out.dtype))
        assert [g.dtype for g in grads] == [t.dtype for t in tensors]
        errors.append([error(g, w) for g, w in zip((out, *grads), wanted)])
    assert sum(errors[0]) <= sum(errors[1])
    assert max(errors[0]) <= 0.01


def test_the_hidden_layer_is_never_whole(monkeypatch):
    """In memory beside x, the result and the parameters: a slice of the hidden layer, not all of it."""
    monkeypatch.setattr(room, "slices", plain_convolution.slices)
    tensors = problem(rows=2**14, channels=16, hidden=128, outputs=16, dtype=torch.float32)
    hidden = 2**14 * 128 * 4
    run = lambda f, **options: peak_bytes(lambda: torch.autograd.grad(f(*tensors, **options).sum(), tensors))  # noqa: E731
    plain = run(textbook)
    assert run(norm_mlp) <= 0.35 * plain
    assert run(norm_mlp, keep_hidden=True) - run(norm_mlp) <= 1.1 * hidden
