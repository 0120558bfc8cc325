"""depthwise_conv2d: F.conv2d(groups=C) in float64, value and every gradient, in both layouts and every dtype."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_arch.ops import depthwise_conv2d, use
from lean_arch.ops.depthwise import portable, reference
from tests.ruler import peak_bytes

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LAYOUTS = (torch.contiguous_format, torch.channels_last)
GEOMETRIES = {  # kernel, stride, padding, dilation, (H, W)
    "3x3": (3, 1, 1, 1, (9, 12)),
    "3x3, halved": (3, 2, 1, 1, (9, 12)),
    "3x3, dilated": (3, 1, 2, 2, (11, 8)),
    "3x3, far apart": (3, 1, 6, 6, (17, 14)),
    "5x5, halved, dilated": (5, 2, 4, 2, (13, 10)),
    "5x5, nothing around": (5, 1, 0, 1, (7, 5)),
    "pairs": ((1, 5), (3, 2), (0, 3), (1, 2), (8, 13)),
    "9 in a row": ((1, 9), 1, (0, 4), 1, (3, 8)),
    "more border than filter": (2, 1, 3, 1, (4, 5)),
    "13x13": (13, 1, 6, 1, (14, 9)),
    "13x13, halved": (13, 2, 6, 1, (14, 9)),
    "31x31 on a small map": (31, 1, 15, 1, (7, 9)),
    "1x1 of one pixel": (1, 1, 0, 1, (1, 1)),
    "3x3 of one pixel": (3, 1, 1, 1, (1, 1)),
    "5x5 onto one pixel": (5, 3, 4, 2, (3, 2)),
    "gaps": (1, 3, 0, 1, (8, 7)),
}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Several of them, and ragged ones, at the sizes of these tests: images of small maps, channels of large ones."""
    monkeypatch.setattr(portable, "SLICE", 2000)


def problem(geometry, dtype=torch.float32, layout=torch.contiguous_format, batch=5, channels=19):
    kernel, *options, size = GEOMETRIES[geometry]
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, channels, *size), (channels, 1, *kernel), (channels,)
    x, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return [t.requires_grad_() for t in (x.to(memory_format=layout), weight, bias)], options


def error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def compare(inputs, options, tolerance, far_layout=False):
    """Value and gradients by a random upstream gradient, against float64."""
    inputs = [t for t in inputs if t is not None]
    ours = depthwise_conv2d(*inputs, **dict(zip(("stride", "padding", "dilation"), options)))
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    bias = doubles[2] if len(doubles) > 2 else None
    theirs = F.conv2d(*doubles[:2], bias, *options, len(doubles[1]))
    upstream = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(ours)
    if far_layout:
        upstream = upstream.transpose(2, 3).contiguous().transpose(2, 3)
    got = torch.autograd.grad(ours, inputs, upstream)
    want = torch.autograd.grad(theirs, doubles, upstream.double())
    assert [g.dtype for g in got] == [t.dtype for t in inputs]
    layout = reference.layout_of(inputs[0])
    assert got[0].is_contiguous(memory_format=layout)
    assert ours.is_contiguous(memory_format=layout)
    for name, g, w in zip(("result", "x", "weight", "bias"), (ours, *got), (theirs, *want)):
        assert error(g, w) <= tolerance, name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(("backend", "dtype"), [*(("torch", d) for d in TOLERANCE), ("reference", torch.float32)])
def test_value_and_gradients(backend, dtype, geometry, layout):
    with use(backend):
        (x, weight, bias), options = problem(geometry, dtype, layout)
        compare((x, weight, bias), options, TOLERANCE[dtype])
        compare((x[:, 3:16], weight[3:16], None), options, TOLERANCE[dtype], far_layout=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_geometry(data):
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    kernel, stride, dilation = ([number(1, 5), number(1, 5)] for _ in range(3))
    padding = [number(0, 7), number(0, 7)]
    size = [max(number(1, 9), d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation)]
    generator = torch.Generator().manual_seed(number(0, 99))
    shapes = (number(1, 4), 3, *size), (3, 1, *kernel), (3,)
    x, weight, bias = (torch.randn(s, generator=generator) for s in shapes)
    x = x.to(memory_format=data.draw(st.sampled_from(LAYOUTS)))
    compare([t.requires_grad_() for t in (x, weight, bias)], (stride, padding, dilation), 5e-6)


def test_gradcheck():
    inputs, options = problem("pairs", torch.float64, batch=2, channels=2)
    torch.autograd.gradcheck(lambda *t: depthwise_conv2d(*t, *options), inputs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_needed(needs, layout):
    inputs, options = problem("3x3", layout=layout)
    compared = torch.autograd.grad(depthwise_conv2d(*inputs, *options).square().sum(), inputs)
    for tensor, need in zip(inputs, needs):
        tensor.requires_grad_(need)
    depthwise_conv2d(*inputs, *options).square().sum().backward()
    for tensor, need, grad in zip(inputs, needs, compared):
        assert (tensor.grad is not None) == need
        assert not need or torch.equal(tensor.grad, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype):
    """Nothing but the result is rounded, and gradients come in each tensor's own dtype."""
    inputs, options = problem("3x3")
    inputs[0] = inputs[0].detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = depthwise_conv2d(*inputs, *options)
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert out.dtype == torch.bfloat16
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    exact = F.conv2d(*doubles, *options, len(doubles[1]))
    assert error(out, exact.bfloat16().double()) < 1e-4
    for grad, want, t in zip(grads, torch.autograd.grad(exact.sum(), doubles), inputs):
        assert grad.dtype == t.dtype
        assert error(grad, want) < (2e-6 if t.dtype == torch.float32 else 4e-3)


def test_maps_of_one_pixel_need_no_convolution(monkeypatch):
    """A network's last maps often are; oneDNN would loop over the channels of all images, 450 ms for what takes 2."""
    grad, x = torch.randn(2, 3, 8, 1, 1)
    monkeypatch.setattr(portable, "convolution", None)
    _, of_weight, _ = portable.backward(grad, x, torch.randn(8, 1, 3, 3), (1, 1), (1, 1), (1, 1), (False, True, False))
    torch.testing.assert_close(of_weight[:, 0, 1, 1], (grad * x).sum((0, 2, 3)))
    assert of_weight.count_nonzero() == 8


def test_a_batch_of_none():
    inputs, options = problem("3x3", batch=0)
    out = depthwise_conv2d(*inputs, *options)
    assert out.shape == (0, 19, 9, 12)
    assert [g.any().item() for g in torch.autograd.grad(out.sum(), inputs)] == [False] * 3


def test_same_bits_twice():
    inputs, options = problem("5x5, halved, dilated", torch.bfloat16)
    one, two = (
        torch.autograd.grad(depthwise_conv2d(*inputs, *options).float().square().sum(), inputs) for _ in range(2)
    )
    assert all(map(torch.equal, one, two))


def test_second_derivative_is_refused():
    (x, weight, _), options = problem("3x3")
    (grad,) = torch.autograd.grad(depthwise_conv2d(x, weight, None, *options).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("geometry", ["3x3", "1x1 of one pixel"])
@pytest.mark.parametrize("biased", [True, False])
def test_opcheck(biased, geometry, layout):
    (x, weight, bias), options = problem(geometry, layout=layout)
    options = [[n, n] for n in options]
    arguments = (x, weight, bias if biased else None, *options, torch.float32, "torch")
    torch.library.opcheck(torch.ops.lean_arch.depthwise_conv2d.default, arguments)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiles_whole(layout):
    inputs, options = problem("3x3, halved", layout=layout)

    def step(x, weight, bias):
        return depthwise_conv2d(x * 2, weight, bias, *options).tanh()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(*(torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, step))):
        assert error(got, want.double()) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_of_the_map_in_memory(dtype, layout, monkeypatch):
    """Results apart, a step takes slices only, however many images there are; F.conv2d takes whole copies."""
    monkeypatch.setattr(portable, "SLICE", 2**14)
    x, weight, bias = (torch.randn(s).to(dtype) for s in ((64, 16, 32, 32), (16, 1, 5, 5), (16,)))
    x = x.to(memory_format=layout)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    step = lambda: depthwise_conv2d(x, weight, bias, padding=2).backward(x.detach())  # noqa: E731
    step()
    x.grad = weight.grad = None
    assert peak_bytes(step) - 2 * x.nbytes < 0.25 * x.nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(4, 5, 5)}, "x must be a tensor"),
        ({"x": torch.ones(2, 4, 9, 9, dtype=torch.int64)}, "x is torch.int64"),
        ({"x": torch.randn(2, 5, 9, 9)}, "weight is"),
        ({"weight": torch.randn(8, 1, 3, 3)}, "weight is"),
        ({"weight": torch.randn(4, 2, 3, 3)}, "a filter for each channel"),
        ({"weight": torch.randn(4, 1, 3)}, "weight must be a tensor"),
        ({"weight": torch.randn(4, 1, 3, 3).bfloat16()}, "weight is torch.bfloat16"),
        ({"bias": torch.randn(3)}, "bias must be"),
        ({"bias": torch.randn(4).double()}, "bias is torch.float64"),
        ({"stride": 0}, "stride 0 must be"),
        ({"stride": 1.0}, "stride 1.0 must be"),
        ({"padding": "same"}, "padding 'same' must be"),
        ({"padding": -1}, "padding -1 must be"),
        ({"dilation": (1, 2, 3)}, "dilation"),
        ({"dilation": 5}, "weight spans 11 numbers of x's height, which is 9 with padding 0"),
        ({"weight": torch.randn(4, 1, 3, 12), "padding": 1}, "weight spans 12 numbers of x's width, which is 11"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    given = {"x": torch.randn(2, 4, 9, 9), "weight": torch.randn(4, 1, 3, 3), "bias": torch.randn(4)} | change
    with pytest.raises(ValueError, match=message):
        depthwise_conv2d(**given)


INTERPRETED = """
import torch
from lean_arch.ops import depthwise_conv2d, use
from lean_arch.ops.depthwise import kernels
from tests.ops.test_depthwise import LAYOUTS, compare, problem

empty_like, empty = torch.Tensor.new_empty, torch.empty
torch.empty = lambda *size, **more: empty(*size, **more).fill_(torch.nan)
torch.Tensor.new_empty = lambda *size, **more: empty_like(*size, **more).fill_(torch.nan)
kernels.STRETCH, kernels.TILE = 30, 256  # several stretches and tiles
with use("triton"):
    for layout in LAYOUTS:
        for geometry in ("3x3, halved", "pairs", "9 in a row"):
            (x, weight, bias), options = problem(geometry, torch.float32, layout, batch=2, channels=5)
            compare((x, weight, bias), options, 2e-6)
        (x, weight, bias), options = problem("gaps", torch.float16, layout, batch=3, channels=5)
        compare((x[:, 1:4], weight[1:4], None), options, 1e-3, far_layout=True)
    (x, weight, bias), options = problem("3x3", batch=2, channels=3)
    with torch.autocast("cpu", torch.float16):
        out = depthwise_conv2d(x, weight, bias, *options)
        grads = torch.autograd.grad(out, (x, weight, bias), out.detach())
    assert (out.dtype, *(g.dtype for g in grads)) == (torch.float16, *[torch.float32] * 3)
print("right")
"""


def test_triton_interpreted():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


def test_stretches_cover_every_pixel_once():
    kernels = pytest.importorskip("lean_arch.ops.depthwise.kernels")
    for batch, pixels, taps in ((8, 49, 9), (7, 3136, 961), (1, 100_000, 9), (0, 5, 9), (300, 1, 1)):
        number, images, span = kernels.stretches(batch, pixels, taps)
        assert number * images * span >= batch * pixels
        assert number <= -(-batch // images) * -(-pixels // span)


def test_triton_refuses_float64_by_name():
    kernels = pytest.importorskip("lean_arch.ops.depthwise.kernels")
    (x, weight, bias), options = problem("3x3", torch.float64)
    with pytest.raises(ValueError, match="float64; Triton"):
        kernels.forward(x, weight, bias, *([n, n] for n in options))


@pytest.mark.gpu
@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("geometry", ["3x3", "3x3, halved", "pairs", "13x13"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_on_a_gpu(dtype, geometry, layout, cudnn, monkeypatch):
    from lean_arch.ops.depthwise import kernels

    if not cudnn:
        monkeypatch.setattr(kernels, "cudnn_is_fast", lambda *known: False)
    inputs, options = problem(geometry, dtype, layout, channels=64)
    with use("triton"), torch.backends.cudnn.flags(allow_tf32=False):
        compare([t.detach().cuda().requires_grad_() for t in inputs], options, 2 * TOLERANCE[dtype])
