"""The chunked feed-forward layer: the plain layer's numbers, and less memory."""

import pytest
import torch
from torch import nn

from lean_arch.blocks import ChunkedFeedForward, ReversibleSequence
from tests.ruler import peak_bytes


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("shape", "chunks"), [((3, 7, 12), 4), ((2, 12), 5), ((1, 1, 12), 8), ((5, 12), 1)])
def test_values_and_gradients(shape, chunks):
    torch.manual_seed(0)
    layer = ChunkedFeedForward(12, 20, chunks=chunks)
    x = torch.randn(shape, requires_grad=True)
    weights = [p.detach().double().requires_grad_() for p in layer.parameters()]
    exact = x.detach().double().requires_grad_()
    want = torch.nn.functional.gelu(exact @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
    out, upstream = layer(x), torch.randn(shape)
    assert error(out, want) < 1e-6
    got = torch.autograd.grad(out, (x, *layer.parameters()), upstream)
    for g, w in zip(got, torch.autograd.grad(want, (exact, *weights), upstream.double())):
        assert error(g, w) < 1e-6


def test_dropout_is_the_same_in_the_backward_pass():
    layer = ChunkedFeedForward(8, 16, chunks=3, dropout=0.5, activation=nn.ReLU).double()
    x = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)

    def run(x):
        torch.manual_seed(0)
        return layer(x)

    assert torch.autograd.gradcheck(run, (x,))
    assert (run(x) == 0).double().mean() > 0.3
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_the_middle_never_exists_whole():
    def peak(chunks):
        layer = ChunkedFeedForward(32, 512, chunks=chunks)
        x = torch.randn(2, 512, 32, requires_grad=True)
        return peak_bytes(lambda: layer(x).sum().backward())

    middle = 2 * 512 * 512 * 4
    assert peak(1) > 2 * middle
    assert peak(16) < 0.6 * middle


@pytest.mark.parametrize("reversible", [True, False])
def test_goes_into_a_reversible_stack_under_autocast(reversible):
    stack = ReversibleSequence([(ChunkedFeedForward(16, chunks=3), ChunkedFeedForward(16, chunks=2))])
    stack.reversible = reversible
    x = torch.randn(4, 5, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y1, y2 = stack((x, x))
    (y1 + y2).sum().backward()
    assert all(p.grad.isfinite().all() for p in (x, *stack.parameters()))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dim": 0}, ValueError, "dim 0 must be a whole number, 1 or more"),
        ({"hidden_dim": -1}, ValueError, "hidden_dim -1 must be a whole number, 1 or more"),
        ({"chunks": 0}, ValueError, "chunks 0 must be a whole number, 1 or more"),
        ({"chunks": 2.5}, ValueError, "chunks 2.5 must be a whole number"),
        ({"dropout": -0.1}, ValueError, "dropout -0.1 must be a share"),
        ({"activation": "gelu"}, TypeError, "activation 'gelu' makes no module"),
        ({"activation": nn.GELU()}, TypeError, r"activation GELU\(.*\) makes no module"),
        ({"activation": nn.functional.relu}, TypeError, "activation <function relu .* makes no module"),
        ({"activation": float}, TypeError, "activation <class 'float'> makes no module"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        ChunkedFeedForward(**({"dim": 8} | options))
