"""Smooth activations, pooling, dropout and linear layers that keep little: PyTorch's values, documented gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_arch.ops.frozen import packing
from lean_arch.ops.frozen.dropout import packed_dropout
from lean_arch.ops.frozen.linear import frozen_linear
from lean_arch.ops.frozen.pool import frozen_avg_pool2d, frozen_max_pool2d
from lean_arch.ops.frozen.smooth import SMOOTH, frozen_activation, grid_of
from tests.ops.test_frozen import LAYOUTS, ROUNDING, kept, randn, same, value_and_gradients
from tests.ruler import peak_bytes

ERROR = {8: 0.004, 4: 0.055, 2: 0.19}  # of the gradient's norm, for normal inputs: Hardswish's; GELU's is half of it


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", SMOOTH)
def test_activations_that_keep_x(name, dtype, layout, monkeypatch):
    monkeypatch.setattr(packing, "SLICE", 64)
    x = randn(3, 7, 5, 3, dtype=dtype, layout=layout).requires_grad_()
    for inputs in (x, x[:, 1:6, ::2], x[:0]):
        ours = value_and_gradients(partial(frozen_activation, name=name), inputs)
        theirs = value_and_gradients(SMOOTH[name].call, inputs)
        assert torch.equal(ours[0], theirs[0])
        assert (ours[1] - theirs[1]).norm() <= 3 * ROUNDING[dtype] * theirs[1].norm()


@pytest.mark.parametrize("bits", ERROR)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", SMOOTH)
def test_activations_that_keep_slopes(name, dtype, bits):
    x = randn(5, 1001, 3, dtype=dtype).requires_grad_()
    ours = value_and_gradients(partial(frozen_activation, name=name, bits=bits), x)
    theirs = value_and_gradients(SMOOTH[name].call, x)
    assert torch.equal(ours[0], theirs[0])
    assert (ours[1] - theirs[1]).norm() <= (ERROR[bits] + 2 * ROUNDING[dtype]) * theirs[1].norm()
    levels = 4 * 2**bits
    assert kept(lambda: frozen_activation(x, name, bits)) == -(-x.numel() * bits // 8) + levels


@pytest.mark.parametrize("name", SMOOTH)
def test_no_slope_is_off_by_more_than_half_a_step(name):
    x = torch.linspace(-20, 20, 100_001).requires_grad_()
    grid = grid_of(name, 8)
    grads = [
        torch.autograd.grad(f(x).sum(), x)[0]
        for f in (SMOOTH[name].call, partial(frozen_activation, name=name, bits=8))
    ]
    assert (grads[0] - grads[1]).abs().max() <= 0.51 / grid.steps
    if name not in ("sigmoid", "tanh"):
        assert {0.0, 1.0} <= set(grid.levels)


def test_two_bits_are_better_than_four_intervals():
    """The slopes of ReGELU2 (arXiv 2406.16282), by its intervals."""
    x = randn(100_000).requires_grad_()
    (exact,) = torch.autograd.grad(F.gelu(x).sum(), x)
    (ours,) = torch.autograd.grad(frozen_activation(x, "gelu", 2).sum(), x)
    intervals = torch.tensor([-3.18588, -0.00118, 3.19083])
    theirs = torch.tensor([0.0, -0.04922, 1.04874, 1.0])[torch.bucketize(x.detach(), intervals)]
    assert (ours - exact).norm() < 0.5 * (theirs - exact).norm()


@pytest.mark.parametrize("bits", ERROR)
def test_in_place(bits):
    x = randn(4, 33).requires_grad_()
    out, grad = value_and_gradients(lambda x: frozen_activation(x, "silu", bits, partial(F.silu, inplace=True)), x)
    want = value_and_gradients(lambda x: frozen_activation(x, "silu", bits), x)
    assert torch.equal(out, want[0])
    assert torch.equal(grad, want[1])
    base = x * 1
    frozen_activation(base, "silu", bits, partial(F.silu, inplace=True))
    assert torch.equal(base, out)


POOLS = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3)},
    {"kernel_size": 3, "stride": (1, 2), "padding": (0, 1), "ceil_mode": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("options", POOLS, ids=str)
def test_pooling(options, dtype, layout):
    x = randn(3, 5, 11, 14, dtype=dtype, layout=layout)
    x[0, 0, 3, 4] = torch.nan
    x.requires_grad_()
    for images in (x, x[0], x[:, ::2]):
        same(partial(frozen_max_pool2d, **options), partial(F.max_pool2d, **options), images)
        same(partial(frozen_avg_pool2d, **options), partial(F.avg_pool2d, **options), images)
    ours = partial(frozen_max_pool2d, **options)
    assert kept(lambda: ours(x)) == ours(x).numel()
    assert kept(lambda: F.max_pool2d(x, **options)) == x.nbytes + 8 * ours(x).numel()
    assert frozen_avg_pool2d(x, **options).grad_fn.saved_tensors == ()


def test_more_pooling():
    x = randn(2, 3, 9, 9).requires_grad_()
    options = {"kernel_size": 2, "padding": 1, "count_include_pad": False, "divisor_override": 3}
    same(partial(frozen_avg_pool2d, **options), partial(F.avg_pool2d, **options), x)
    options = {"kernel_size": (2, 3), "dilation": (3, 2), "stride": 1}
    same(partial(frozen_max_pool2d, **options), partial(F.max_pool2d, **options), x)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([0.1, 0.5, 0.9]), st.integers(1, 5), st.integers(1, 200), st.sampled_from(list(ROUNDING)))
def test_dropout_of_the_same_random_numbers(p, rows, columns, dtype):
    x = randn(rows, columns, dtype=dtype).requires_grad_()
    results = []
    for dropout in (packed_dropout, F.dropout):
        torch.manual_seed(7)
        results.append((*value_and_gradients(partial(dropout, p=p), x), torch.rand(1)))
    assert all(map(torch.equal, *results))
    assert kept(lambda: packed_dropout(x, p)) == -(-x.numel() // 8)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_under_autocast(bias):
    x, weight = randn(4, 7, 32).requires_grad_(), torch.nn.Parameter(randn(64, 32, seed=2), False)
    bias = randn(64, seed=3).requires_grad_() if bias else None
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (value_and_gradients(f, x, weight, bias) for f in (frozen_linear, F.linear))
        assert kept(lambda: frozen_linear(x, weight, bias)) == 0
        assert kept(lambda: F.linear(x, weight, bias)) >= weight.nbytes // 2
    assert torch.equal(ours[0], theirs[0])
    for got, want in zip(ours[1:], theirs[1:]):
        assert got.dtype == want.dtype == torch.float32
        assert (got - want).norm() < 5e-3 * want.norm()
    same(frozen_linear, F.linear, x, weight, bias, tolerance=1e-6)
    same(frozen_linear, F.linear, x[0, 0], weight, bias, tolerance=1e-6)


@pytest.mark.parametrize("bits", [8, 2])
def test_scratch_is_a_slice(bits, monkeypatch):
    monkeypatch.setattr(packing, "SLICE", 2**13)
    x = randn(2**19).requires_grad_()

    def step():
        frozen_activation(x, "gelu", bits).backward(x.detach())
        x.grad = None

    assert peak_bytes(step) < (2.15 + bits / 32) * x.nbytes  # the result and the gradient


def test_no_second_derivative():
    x = randn(2, 3, 4, 4).requires_grad_()
    for function in (
        partial(frozen_activation, name="gelu"),
        partial(frozen_activation, name="gelu", bits=8),
        partial(frozen_max_pool2d, kernel_size=2),
        packed_dropout,
        lambda x: frozen_linear(x, randn(5, 4)),
    ):
        (grad,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            grad.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: frozen_activation(x, "swoosh"), "activation 'swoosh' is unknown; gelu"),
        (lambda x: frozen_activation(x, "gelu", 3), "bits 3 must be 8, 4 or 2"),
        (lambda x: frozen_max_pool2d(x, 17), "kernel_size 17 has more than 256"),
        (lambda x: packed_dropout(x, 1.5), "p 1.5 must be between 0 and 1"),
        (lambda x: packed_dropout(x, 0), "p 0 must be between 0 and 1"),
        (lambda x: frozen_linear(x, randn(4, 20).requires_grad_()), "weight requires a gradient"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(randn(2, 3, 20, 20))
