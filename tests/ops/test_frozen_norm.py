"""Norms of frozen weights: PyTorch's values to the bit; gradients to rounding, or nearly exact from 8 bits a number."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_arch.ops import plain_convolution
from lean_arch.ops.frozen.batch_norm import compressed_batch_norm
from lean_arch.ops.frozen.norm import frozen_group_norm, frozen_layer_norm, frozen_layer_norm2d, frozen_rms_norm
from tests.ops.test_frozen import LAYOUTS, ROUNDING, kept, randn, value_and_gradients
from tests.ruler import peak_bytes


def layer_norm2d(x, weight, bias, eps):
    return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, eps).permute(0, 3, 1, 2)


def our_layer_norm2d(x, weight, bias, eps, compressed):
    call = partial(layer_norm2d, weight=weight, bias=bias, eps=eps)
    return frozen_layer_norm2d(x, weight, bias, eps, compressed, call)


# ours(x, weight, bias, compressed), PyTorch's(x, weight, bias), shape of x, shape of weight
NORMS = {
    "layer": (
        lambda x, w, b, c: frozen_layer_norm(x, (48,), w, b, 1e-5, c),
        lambda x, w, b: F.layer_norm(x, (48,), w, b, 1e-5),
        (3, 7, 48),
        (48,),
    ),
    "layer of two dimensions": (
        lambda x, w, b, c: frozen_layer_norm(x, (4, 12), w, b, 1e-5, c),
        lambda x, w, b: F.layer_norm(x, (4, 12), w, b, 1e-5),
        (5, 4, 12),
        (4, 12),
    ),
    "rms": (
        lambda x, w, b, c: frozen_rms_norm(x, (48,), w, None, c),
        lambda x, w, b: F.rms_norm(x, (48,), w),
        (3, 7, 48),
        (48,),
    ),
    "group": (
        lambda x, w, b, c: frozen_group_norm(x, 3, w, b, 1e-5, c),
        lambda x, w, b: F.group_norm(x, 3, w, b, 1e-5),
        (3, 12, 5, 7),
        (12,),
    ),
    "group without size": (
        lambda x, w, b, c: frozen_group_norm(x, 3, w, b, 1e-5, c),
        lambda x, w, b: F.group_norm(x, 3, w, b, 1e-5),
        (3, 48),
        (48,),
    ),
    "channels": (
        lambda x, w, b, c: our_layer_norm2d(x, w, b, 1e-6, c),
        lambda x, w, b: layer_norm2d(x, w, b, 1e-6),
        (3, 48, 5, 7),
        (48,),
    ),
}


def compare(ours, theirs, x, weight, bias, tolerance):
    """Values have PyTorch's bits, gradients are near those in float64."""
    got = value_and_gradients(ours, x, weight, bias)
    assert torch.equal(got[0], theirs(x, weight, bias))
    doubles = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight, bias)]
    out = theirs(*doubles)
    wanted = [t for t in doubles if t is not None and t.requires_grad]
    upstream = randn(*out.shape, seed=1).to(got[0].dtype).double()
    for g, w, t in zip(got[1:], torch.autograd.grad(out, wanted, upstream), (x, bias)):
        assert g.dtype == t.dtype
        assert (g.double() - w).norm() <= tolerance * w.norm()


def problem(name, dtype, layout, affine):
    ours, theirs, shape, affine_shape = NORMS[name]
    x = randn(*shape, dtype=dtype, layout=layout).requires_grad_()
    if not affine:
        return ours, theirs, x, None, None
    bias = None if name == "rms" else randn(*affine_shape, dtype=dtype, seed=3).requires_grad_()
    return ours, theirs, x, randn(*affine_shape, dtype=dtype, seed=2), bias


@pytest.mark.parametrize("in_slices", [False, True])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", NORMS)
def test_value_and_gradients(name, dtype, layout, affine, in_slices, monkeypatch):
    if in_slices:
        monkeypatch.setattr(plain_convolution.slices, "__defaults__", (0, 1, 1))
    ours, theirs, *inputs = problem(name, dtype, layout, affine)
    exact, nearly = (partial(lambda x, w, b, c: ours(x, w, b, c), c=c) for c in (False, True))
    compare(exact, theirs, *inputs, ROUNDING[dtype])
    compare(nearly, theirs, *inputs, max(4e-3, ROUNDING[dtype]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 3]), st.integers(1, 5), st.integers(8, 40), st.booleans(), st.integers(0, 99))
def test_any_rows(batch, rows, size, transposed, seed):
    x = randn(batch, rows, size, seed=seed) if not transposed else randn(rows, batch, size, seed=seed).transpose(0, 1)
    x.requires_grad_()
    weight, bias = randn(size, seed=2), randn(size, seed=3).requires_grad_()
    compare(
        lambda x, w, b: frozen_layer_norm(x, (size,), w, b),
        lambda x, w, b: F.layer_norm(x, (size,), w, b),
        *(x, weight, bias),
        1e-5,
    )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_what_is_kept(name, affine):
    ours, theirs, x, weight, bias = problem(name, torch.float32, torch.contiguous_format, affine)
    weight = weight if weight is None else torch.nn.Parameter(weight, False)
    statistics = 2 * 4 * x.numel() // 16  # of rows of 16 numbers or more
    assert kept(lambda: ours(x, weight, bias, True)) <= x.numel() + statistics
    assert x.nbytes <= kept(lambda: ours(x, weight, bias, False)) <= x.nbytes + statistics
    assert kept(lambda: theirs(x, weight, bias)) >= x.nbytes
    out = ours(x, weight, bias, False)
    storages = {t.data_ptr() for t in out.grad_fn.saved_tensors if t is not None}
    assert ((out if not affine else x).data_ptr()) in storages


def test_outliers_and_constant_rows():
    """The worst for one scale a row: all but nothing of it but a number."""
    x = randn(64, 768)
    x[:, 5] *= 300
    x[3] = 2.0
    x[4] = 0.0
    grads = [
        torch.autograd.grad(f(x.requires_grad_(), (768,)), x, randn(64, 768, seed=1))[0]
        for f in (partial(frozen_layer_norm, compressed=True), F.layer_norm)
    ]
    assert grads[0].isfinite().all()
    for row in (3, 4, slice(5, None)):
        assert (grads[0] - grads[1])[row].norm() < 2e-3 * grads[1][row].norm()


def test_half_precision_keeps_x_alone():
    """Norms of several operators keep float32 copies."""
    x = randn(4, 64, 128, dtype=torch.bfloat16).requires_grad_()
    weight = torch.nn.Parameter(randn(128, dtype=torch.bfloat16, seed=2), False)

    def by_hand(x):
        rows = x.float()
        return weight * (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    ours = partial(frozen_rms_norm, normalized_shape=(128,), weight=weight, eps=1e-6, call=by_hand)
    one, two = value_and_gradients(ours, x), value_and_gradients(by_hand, x)
    assert torch.equal(one[0], two[0])
    assert (one[1] - two[1]).float().norm() < 4e-3 * two[1].float().norm()
    assert kept(lambda: ours(x)) <= x.nbytes + 4 * 4 * 64
    assert kept(lambda: by_hand(x)) >= 2 * x.nbytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_by_the_batch(dtype, layout, monkeypatch):
    monkeypatch.setattr(plain_convolution.slices, "__defaults__", (0, 600, 1))
    weight, bias = randn(7, seed=2), randn(7, seed=3).requires_grad_()
    running = [randn(7, seed=4), randn(7, seed=5).abs()], [randn(7, seed=4), randn(7, seed=5).abs()]
    x = randn(6, 7, 9, 8, dtype=dtype, layout=layout).requires_grad_()
    ours = value_and_gradients(lambda x, w, b: compressed_batch_norm(x, *running[0], w, b, 0.2), x, weight, bias)
    theirs = value_and_gradients(lambda x, w, b: F.batch_norm(x, *running[1], w, b, True, 0.2), x, weight, bias)
    assert torch.equal(ours[0], theirs[0])
    assert all(map(torch.equal, *running))
    for got, want in zip(ours[1:], theirs[1:]):
        assert (got - want).float().norm() < (1e-3 if dtype == torch.float32 else 5e-3) * want.float().norm()
    for maps in (x, x[:, :, 0]):
        rows = maps.shape[0] * 7
        assert kept(lambda: compressed_batch_norm(maps, None, None, weight, bias)) <= maps.numel() + 4 * (rows + 7)  # noqa: B023


@pytest.mark.parametrize("compressed", [False, True])
def test_scratch_is_a_slice(compressed, monkeypatch):
    monkeypatch.setattr(plain_convolution.slices, "__defaults__", (0, 2**13, 1))
    x, weight = randn(1, 2048, 256).requires_grad_(), randn(256)

    def step():
        frozen_layer_norm(x, (256,), weight, compressed=compressed).backward(x.detach())
        x.grad = None

    assert peak_bytes(step) < (2.2 + 0.25 * compressed) * x.nbytes  # the result and the gradient


@pytest.mark.parametrize("name", NORMS)
def test_a_result_may_be_written_over(name):
    """Unless it is what is kept."""
    for affine, compressed in ((True, False), (True, True), (False, True)):
        ours, theirs, *inputs = problem(name, torch.float32, torch.contiguous_format, affine)
        calls = partial(lambda f, *t: f(*t, compressed), ours), theirs  # noqa: B023
        one, two = (value_and_gradients(lambda *t: call(*t).mul_(2), *inputs) for call in calls)  # noqa: B023
        assert torch.equal(one[0], two[0])
        assert (one[1] - two[1]).norm() < 4e-3 * two[1].norm()
    out = ours(inputs[0], None, None, False)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: frozen_layer_norm(x, (8,), w),
        lambda x, w: frozen_rms_norm(x, (8,), w),
        lambda x, w: frozen_group_norm(x, 2, w),
        lambda x, w: compressed_batch_norm(x, weight=w),
    ],
)
def test_trained_weights_are_refused(call):
    with pytest.raises(ValueError, match="weight requires a gradient"):
        call(randn(3, 8), randn(8).requires_grad_())


def test_no_second_derivative():
    x = randn(3, 8).requires_grad_()
    (grad,) = torch.autograd.grad(frozen_layer_norm(x, (8,)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()
