"""bf16 dense layers on the CPU: autograd's own values and gradients, by products along rows."""

import pytest
import torch
import torch.nn.functional as F

from lean_arch.ops import linear


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(linear, "_emulated", lambda: True)  # on every CPU


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 4, 5), (0, 5)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_same_bits_forward_and_close_gradients(shape, with_bias, autocast):
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    tensors = [torch.randn(shape, dtype=dtype), torch.randn(7, 5, dtype=dtype), torch.randn(7, dtype=dtype)]
    tensors = [t.requires_grad_() for t in tensors[: 3 if with_bias else 2]]
    results = []
    for context in (linear.rowwise_linears, torch.autograd.set_grad_enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), context() if not results else context(True):
            out = F.linear(*tensors)
        grads = torch.autograd.grad(
            out, tensors, torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        )
        results.append((out, *grads))
    ours, theirs = results
    assert "_Linear" in ours[0].grad_fn.name()
    assert "_Linear" not in theirs[0].grad_fn.name()
    assert torch.equal(ours[0], theirs[0])
    for got, want in zip(ours, theirs):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_gradients_against_float64():
    torch.manual_seed(0)
    x, weight, bias, grad = (
        t.bfloat16() for t in (torch.randn(33, 48), torch.randn(20, 48), torch.randn(20), torch.randn(33, 20))
    )
    inputs = [t.clone().requires_grad_() for t in (x, weight, bias)]
    with linear.rowwise_linears():
        got = torch.autograd.grad(F.linear(*inputs), inputs, grad)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    want = torch.autograd.grad(F.linear(*exact), exact, grad.double())
    for g, w in zip(got, want):
        assert (g.double() - w).norm() < 4e-3 * w.norm()


def test_frozen_parts_and_second_derivatives():
    x = torch.randn(3, 5, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.bfloat16)
    with linear.rowwise_linears():
        out = F.linear(x, weight)
    (grad,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    want = 2 * (weight.float().t() @ weight.float()).sum(0).expand(3, 5)
    torch.testing.assert_close(second.float(), want, rtol=0.1, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_are_left_alone(dtype):
    x, weight = torch.randn(3, 5, dtype=dtype, requires_grad=True), torch.randn(7, 5, dtype=dtype)
    with linear.rowwise_linears():
        assert "_Linear" not in F.linear(x, weight).grad_fn.name()
