"""Layers of frozen weights: PyTorch's values and gradients, to the bit where its kernels run; memory falls."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_arch.ops import plain_convolution
from lean_arch.ops.frozen import packing
from lean_arch.ops.frozen.batch_norm import frozen_batch_norm
from lean_arch.ops.frozen.convolution import frozen_conv
from lean_arch.ops.frozen.piecewise import frozen_hardtanh, frozen_leaky_relu, frozen_relu
from tests.ruler import peak_bytes

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14}
LAYOUTS = torch.contiguous_format, torch.channels_last
PIECEWISE = [
    (frozen_relu, F.relu),
    (partial(frozen_hardtanh, min_val=0.0, max_val=6.0), F.relu6),
    (partial(frozen_hardtanh, min_val=-0.5, max_val=0.25), partial(F.hardtanh, min_val=-0.5, max_val=0.25)),
    (partial(frozen_leaky_relu, negative_slope=0.2), partial(F.leaky_relu, negative_slope=0.2)),
]


def randn(*shape, dtype=torch.float32, seed=0, layout=torch.contiguous_format):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.contiguous(memory_format=layout) if x.dim() == 4 else x


def value_and_gradients(function, *inputs):
    """Of what requires a gradient among `inputs`, each of which enters as no leaf, so that it may be written over."""
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    out = function(*(t * 1 if t is not None and t.requires_grad else t for t in inputs))
    return out, *torch.autograd.grad(out, wanted, randn(*out.shape, seed=1).to(out))


def same(ours, theirs, *inputs, tolerance=0.0):
    for got, want in zip(value_and_gradients(ours, *inputs), value_and_gradients(theirs, *inputs), strict=True):
        assert got.dtype == want.dtype
        if tolerance:
            assert (got.double() - want.double()).norm() <= tolerance * want.double().norm()
        else:
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.nan_to_num(), want.nan_to_num())


def kept(function):
    """Bytes that the graph of function()'s result keeps, parameters left out."""
    storages = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    assert out.requires_grad
    return sum(storages.values())


CONVOLUTIONS = {
    "3x3": ((8, 5, 3, 3), {"padding": 1}),
    "halved, no bias": ((8, 5, 3, 2), {"stride": 2, "padding": (1, 0)}),
    "same, even kernel": ((6, 5, 4, 3), {"padding": "same", "dilation": (1, 2)}),
    "valid": ((6, 5, 3, 3), {"padding": "valid"}),
    "1x1, halved": ((6, 5, 1, 1), {"stride": 2}),
    "depthwise": ((5, 1, 5, 5), {"padding": 2, "groups": 5}),
    "one size": ((6, 5, 3), {"stride": 2, "padding": 1}),
    "three sizes": ((6, 5, 2, 3, 1), {"stride": (1, 2, 1), "padding": (0, 1, 0)}),
}


@pytest.mark.parametrize("in_slices", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_has_the_bits_of_pytorch(name, dtype, layout, in_slices, monkeypatch):
    """Which oneDNN rounds by the number of images, so that slices of them may differ in their last bits."""
    tolerance = 0.0
    if in_slices:
        monkeypatch.setattr(plain_convolution.slices, "__defaults__", (0, 1, 1))
        tolerance = ROUNDING[dtype]
    shape, options = CONVOLUTIONS[name]
    weight = randn(*shape, dtype=dtype, seed=2)
    sizes = (9, 11, 7)[: len(shape) - 2]
    x = randn(3, 5, *sizes, dtype=dtype, layout=layout).requires_grad_()
    bias = None if "no bias" in name else randn(shape[0], dtype=dtype)
    theirs = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
    for images in (x, x[0]):
        same(partial(frozen_conv, **options), partial(theirs, **options), images, weight, bias, tolerance=tolerance)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_convolution(data):
    """Not channels_last, for which oneDNN crashes where a map is narrower than its padding."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    groups = number(1, 3)
    kernel, stride, dilation = ([number(1, 4), number(1, 4)] for _ in range(3))
    padding = [number(0, 4), number(0, 4)]
    size = [max(number(1, 9), d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation)]
    x = randn(number(1, 3), 2 * groups, *size).requires_grad_()
    weight, bias = randn(groups * number(1, 3), 2, *kernel, seed=2), randn(1)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    bias = bias.expand(len(weight)).contiguous().requires_grad_()
    same(partial(frozen_conv, **options), partial(F.conv2d, **options), x, weight, bias, tolerance=1e-6)


@pytest.mark.parametrize("needs_x", [True, False])
def test_a_trained_bias_needs_nothing_either(needs_x):
    x, weight = randn(4, 16, 20, 20).requires_grad_(needs_x), torch.nn.Parameter(randn(16, 16, 3, 3), False)
    bias = torch.nn.Parameter(randn(16))
    same(frozen_conv, F.conv2d, x, weight, bias, tolerance=1e-6)
    assert kept(lambda: frozen_conv(x, weight, bias)) == 0
    assert kept(lambda: F.conv2d(x, weight, bias)) >= x.nbytes


def test_convolution_under_autocast():
    x, weight = randn(4, 16, 20, 20).requires_grad_(), torch.nn.Parameter(randn(64, 16, 3, 3), False)
    bias = torch.nn.Parameter(randn(64))
    with torch.autocast("cpu", torch.bfloat16):
        assert kept(lambda: frozen_conv(x, weight, bias)) == 0
        assert kept(lambda: F.conv2d(x, weight, bias)) >= weight.nbytes // 2 + x.nbytes // 2
        out, *grads = value_and_gradients(frozen_conv, x, weight, bias)
        theirs, of_x, of_bias = value_and_gradients(F.conv2d, x, weight, bias)
    assert torch.equal(out, theirs)
    assert torch.equal(grads[0], of_x)
    exact = randn(*out.shape, seed=1).to(out).double().sum((0, 2, 3))
    assert (grads[1] - exact).norm() < 1e-6 * exact.norm()  # theirs is rounded to 16 bits
    assert (of_bias - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_by_running_statistics(affine, dtype, layout):
    wide = torch.promote_types(dtype, torch.float32)
    mean, var, weight, bias = (randn(7, dtype=wide, seed=n) for n in range(4))
    var = var.abs() + 0.1
    bias.requires_grad_(affine)
    rest = (weight, bias) if affine else (None, None)
    x = randn(3, 7, 5, 6, dtype=dtype, layout=layout).requires_grad_()
    for maps in (x, x[:, :, 0], x[:, :, 0, 0]):
        same(frozen_batch_norm, F.batch_norm, maps, mean, var, *rest, tolerance=ROUNDING[dtype])
    assert kept(lambda: frozen_batch_norm(x, mean, var, *rest)) == mean.nbytes


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("pair", range(len(PIECEWISE)))
def test_piecewise_activations(pair, dtype, layout, inplace, monkeypatch):
    monkeypatch.setattr(packing, "SLICE", 64)
    ours, theirs = (partial(f, inplace=inplace) for f in PIECEWISE[pair])
    x = randn(3, 7, 5, 3, dtype=dtype, layout=layout)
    # of a NaN, PyTorch's kernels for hardtanh make this or that, by whether they are vectorised
    x[0, 0] = torch.tensor([-torch.inf, torch.inf, torch.nan if pair in (0, 3) else 1.0])
    x[1, 0] = torch.tensor([0.0, -0.5, 0.25])
    x[1, 1] = torch.tensor([6.0, -0.0, 5.0])
    x.requires_grad_()
    same(ours, theirs, x)
    same(ours, theirs, x[:, 1:6, ::2])
    same(ours, theirs, x[:0])
    assert kept(lambda: ours(x * 1)) == -(-x.numel() // 8)


def test_in_place_on_a_view_reaches_the_base():
    grads = []
    for relu in (frozen_relu, F.relu):
        x = randn(4, 6).requires_grad_()
        base = x * 2
        relu(base[:, 2:5], inplace=True)
        assert (base[:, 2:5] >= 0).all()
        grads += torch.autograd.grad(base.square().sum(), x)
    assert torch.equal(*grads)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 64, 2**18]))
def test_codes_come_back(numel, bits, slice_size):
    codes = torch.randint(2**bits, (numel,), dtype=torch.uint8)
    before, packing.SLICE = packing.SLICE, slice_size
    try:
        packed = packing.pack(codes, bits, lambda part: part)
        assert packed.numel() == -(-numel * bits // 8)
        for part in packing.parts_of(codes):
            assert torch.equal(packing.unpack(packed, part, bits), codes[part])
    finally:
        packing.SLICE = before


def test_memory_falls():
    """Layers of a convolutional net: 1 bit a number is kept."""
    x, weight = randn(64, 32, 16, 16).requires_grad_(), torch.nn.Parameter(randn(32, 32, 1, 1), False)
    norm = [torch.nn.Parameter(randn(32, seed=n).abs(), False) for n in range(4)]

    def step(conv, batch_norm, relu):
        y = x
        for _ in range(8):
            y = relu(batch_norm(conv(y, weight), *norm), inplace=True)
        y.square().sum().backward()
        x.grad = None

    ours = peak_bytes(partial(step, frozen_conv, frozen_batch_norm, frozen_relu))
    theirs = peak_bytes(partial(step, F.conv2d, F.batch_norm, F.relu))
    assert ours < 5.5 * x.nbytes  # the loss and gradients on their way
    assert theirs > 18 * x.nbytes


def test_no_second_derivative():
    x = randn(2, 3, 4, 4).requires_grad_()
    for function in (frozen_relu, lambda x: frozen_conv(x, randn(5, 3, 1, 1))):
        (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            grad.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: frozen_conv(x, w.requires_grad_()), "weight requires a gradient"),
        (lambda x, w: frozen_conv(x, w[0, 0]), "weight must be"),
        (lambda x, w: frozen_conv(x, w, padding="same", stride=2), "padding 'same' with stride"),
        (lambda x, w: frozen_conv(x, w, padding="some"), "padding 'some' with stride"),
        (lambda x, w: frozen_batch_norm(x, *randn(2, 3), randn(3).requires_grad_()), "weight requires a gradient"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(randn(2, 3, 5, 5), randn(4, 3, 2, 2))
