"""layer_norm2d, alone and beside a convolution: values and every gradient against F.layer_norm in float64."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_arch.ops import layer_norm2d, plain_convolution, use
from lean_arch.ops.layer_norm2d import convolution, portable
from lean_arch.ops.layer_norm2d.convolution import convolve_norm, norm_convolve
from lean_arch.ops.plain_convolution import Geometry
from tests.ruler import peak_bytes

TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LAYOUTS = (torch.contiguous_format, torch.channels_last)
SHAPES = (5, 19, 9, 7), (3, 1, 4, 5), (2, 33, 1, 1), (1, 130, 3, 2), (4, 6, 1, 8)
PATCHES = Geometry((2, 2), (0, 0), (1, 1), 1)
GROUPS = Geometry((1, 2), (1, 0), (1, 1), 2)
EPS = 1e-3


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Several, and a ragged one, at the sizes of these tests."""
    for place in (portable, convolution):
        monkeypatch.setattr(place, "slices", lambda x: plain_convolution.slices(x, elements=x.numel() // 2))


def problem(shape=SHAPES[0], dtype=torch.float32, layout=torch.contiguous_format, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(s, generator=generator) for s in (shape, shape[1:2], shape[1:2]))
    x = (x * 3 + 5).to(dtype).to(memory_format=layout)
    return [t.requires_grad_() for t in (x, weight.to(dtype), bias.to(dtype))]


def textbook(x, weight=None, bias=None, eps=EPS):
    return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, eps).permute(0, 3, 1, 2)


def error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def compare(inputs, tolerance, ours=layer_norm2d, theirs=textbook, far_layout=False):
    """Value and gradients by a random upstream gradient, against float64."""
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    got, want = ours(*inputs, eps=EPS), theirs(*doubles)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(got)
    if far_layout:
        upstream = upstream.transpose(2, 3).contiguous().transpose(2, 3)
    grads = torch.autograd.grad(got, inputs, upstream)
    wanted = torch.autograd.grad(want, doubles, upstream.double())
    assert [g.dtype for g in (got, *grads)] == [t.dtype for t in (inputs[0], *inputs)]
    for name, g, w in zip(("result", "x", "weight", "bias", "filters", "offset"), (got, *grads), (want, *wanted)):
        assert g.shape == w.shape
        nothing = w.norm() < 1e-9  # what is left of one channel, and its gradients
        assert error(g, w) <= tolerance or (nothing and g.norm() <= 1e-4 * upstream.norm()), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("backend", "dtype"), [*(("torch", d) for d in TOLERANCE), ("reference", torch.float32)])
def test_value_and_gradients(backend, dtype, shape, layout):
    with use(backend):
        x, weight, bias = problem(shape, dtype, layout)
        compare((x, weight, bias), TOLERANCE[dtype])
        compare((x,), TOLERANCE[dtype], far_layout=True)
        if shape[1] > 6:  # neither layout
            compare((x[:, 2:7], weight[2:7]), TOLERANCE[dtype])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_bits_of_torch(layout):
    """And its strides; sums over the batch are made in another order."""
    inputs = problem(layout=layout)
    upstream = torch.randn(SHAPES[0])
    results = [(y, *torch.autograd.grad(y, inputs, upstream)) for y in (layer_norm2d(*inputs, EPS), textbook(*inputs))]
    for got, want in zip(*(r[:2] for r in results)):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape(data):
    shape = [data.draw(st.integers(1, high)) for high in (6, 40, 9, 9)]
    shape[1] += 3  # of two channels, what is left is 1 and -1
    x, weight, bias = problem(shape, torch.float64, seed=data.draw(st.integers(0, 99)))
    x = x.detach().to(memory_format=data.draw(st.sampled_from(LAYOUTS)))
    if data.draw(st.booleans()):
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    compare((x.requires_grad_(), weight, bias), 1e-10)


def convolutions(shape, outputs, geometry, kernel, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    filters = torch.randn(outputs, shape[1] // geometry.groups, *kernel, generator=generator).to(dtype)
    return filters.requires_grad_(), torch.randn(outputs, generator=generator).to(dtype).requires_grad_()


PAIRS = {
    "behind": (
        lambda g: lambda x, w, b, f, o, eps: norm_convolve(x, w, b, eps, f, o, g),
        lambda g: lambda x, w, b, f, o: F.conv2d(textbook(x, w, b), f, o, *g),
    ),
    "before": (
        lambda g: lambda x, w, b, f, o, eps: convolve_norm(x, f, o, g, w, b, eps),
        lambda g: lambda x, w, b, f, o: textbook(F.conv2d(x, f, o, *g), w, b),
    ),
}


def pair_problem(side, geometry, kernel, dtype=torch.float32, layout=torch.contiguous_format):
    shape = 5, 6, 9, 8
    inputs = problem(shape, dtype, layout)
    inputs += convolutions(shape, 6, geometry, kernel, dtype)
    return inputs, *(make(geometry) for make in PAIRS[side])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("geometry", "kernel"), [(PATCHES, (2, 2)), (GROUPS, (3, 1))], ids=["2x2", "groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", PAIRS)
def test_with_a_convolution(side, dtype, geometry, kernel, layout):
    inputs, ours, theirs = pair_problem(side, geometry, kernel, dtype, layout)
    compare(inputs, 4 * TOLERANCE[dtype], ours, theirs)


@pytest.mark.parametrize("side", PAIRS)
def test_a_pair_under_autocast_is_as_near_as_the_textbook(side):
    inputs, ours, theirs = pair_problem(side, PATCHES, (2, 2))
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    exact = theirs(*doubles)
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = exact, *torch.autograd.grad(exact, doubles, upstream.double())
    errors = []
    for run in (lambda: ours(*inputs, eps=EPS), lambda: theirs(*inputs)):
        with torch.autocast("cpu", torch.bfloat16):
            out = run()
        assert out.dtype == torch.bfloat16
        grads = torch.autograd.grad(out, inputs, upstream)
        assert all(g.dtype == torch.float32 for g in grads)
        errors.append(sum(error(g, w) for g, w in zip((out, *grads), wanted)))
    assert errors[0] <= 1.05 * errors[1], errors


@pytest.mark.parametrize("side", [None, *PAIRS])
def test_only_the_gradients_that_are_needed(side):
    inputs, run = problem(), lambda *t: layer_norm2d(*t, EPS)
    if side:
        inputs, ours, _ = pair_problem(side, PATCHES, (2, 2))
        run = lambda *t: ours(*t, eps=EPS)  # noqa: E731
    full = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    for number, only in enumerate(inputs):
        for t in inputs:
            t.requires_grad_(t is only)
            t.grad = None
        run(*inputs).square().sum().backward()
        assert [t.grad is not None for t in inputs] == [t is only for t in inputs]
        assert torch.equal(only.grad, full[number]), number


def test_gradcheck():
    inputs = problem((2, 3, 2, 2), torch.float64)
    torch.autograd.gradcheck(lambda *t: layer_norm2d(*t, EPS), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_another_dtype(dtype):
    """As under autocast, with it and without: only the result is rounded, and gradients come in each tensor's dtype."""
    x, weight, bias = problem()
    x = x.detach().to(dtype).requires_grad_()
    bias = bias.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        compare((x, weight, bias), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("side", [None, *PAIRS])
def test_a_batch_of_none(side):
    inputs, run = problem((0, 6, 4, 4)), layer_norm2d
    if side:
        inputs += convolutions((0, 6), 6, PATCHES, (2, 2))
        run = PAIRS[side][0](PATCHES)
    out = run(*inputs, eps=EPS)
    assert len(out) == 0
    grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
    assert not any(g is not None and g.any() for g in grads)


@pytest.mark.parametrize("side", [None, *PAIRS])
def test_same_bits_twice_and_no_second_derivative(side):
    inputs, run = problem(), layer_norm2d
    if side:
        inputs, run, _ = pair_problem(side, PATCHES, (2, 2))
    loss = run(*inputs, eps=EPS).square().sum()
    one, two = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, one, two))
    (grad,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("affine", [0, 1, 2])
def test_opcheck(affine, layout):
    inputs = problem(layout=layout)[: 1 + affine]
    arguments = (*inputs, *[None] * (2 - affine), EPS, "torch")
    torch.library.opcheck(torch.ops.lean_arch.layer_norm2d.default, arguments)


def test_compiles_whole():
    inputs = problem()

    def step(x, weight, bias):
        return layer_norm2d(x * 2, weight, bias, EPS).tanh()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(*(torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, step))):
        assert error(got, want.double()) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_of_the_map_in_memory(dtype, layout, monkeypatch):
    """Results apart, a step takes slices only, however many images there are."""
    monkeypatch.setattr(portable, "slices", lambda x: plain_convolution.slices(x, elements=2**13))
    inputs = problem((64, 16, 32, 32), dtype, layout)
    upstream = inputs[0].detach()
    step = lambda: layer_norm2d(*inputs).backward(upstream)  # noqa: E731
    step()
    inputs[0].grad = None
    assert peak_bytes(step) - 2 * upstream.nbytes < 0.2 * upstream.nbytes


@pytest.mark.parametrize("side", PAIRS)
def test_a_pair_keeps_its_input_alone(side, monkeypatch):
    monkeypatch.setattr(convolution, "slices", lambda x: plain_convolution.slices(x, elements=2**13))
    geometry = Geometry((1, 1), (0, 0), (1, 1), 1)
    inputs = [*problem((16, 16, 32, 32)), *convolutions((16, 16), 16, geometry, (1, 1))]
    ours, theirs = (make(geometry) for make in PAIRS[side])
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
        ours(*inputs, eps=EPS)
    assert sum(kept.values()) == sum(t.nbytes for t in inputs)
    mine = peak_bytes(lambda: torch.autograd.grad(ours(*inputs, eps=EPS).sum(), inputs))
    assert mine <= 0.8 * peak_bytes(lambda: torch.autograd.grad(theirs(*inputs).sum(), inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(4, 5, 5)}, r"x must be a tensor \(B, C, H, W\) of one channel or more, got \(4, 5, 5\)"),
        ({"x": [1.0]}, "x must be a tensor .* got list"),
        ({"x": torch.randn(2, 0, 3, 3)}, "x must be a tensor"),
        ({"x": torch.ones(2, 4, 9, 9, dtype=torch.int64)}, "x is torch.int64; float32"),
        ({"x": torch.randn(2, 5, 9, 9)}, r"weight must be a tensor \(5,\), one number a channel of x, got \(4,\)"),
        ({"bias": torch.randn(3)}, r"bias must be a tensor \(4,\), one number a channel of x, got \(3,\)"),
        ({"weight": 1.0}, "weight must be a tensor .* got float"),
        ({"weight": torch.ones(4).double()}, "weight is torch.float64, but x is torch.float32"),
        ({"bias": torch.ones(4, dtype=torch.int32)}, "bias is torch.int32, but x is torch.float32"),
        ({"eps": -1}, "eps -1 must be a number, 0 or more"),
        ({"eps": "1e-6"}, "eps '1e-6' must be a number"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    given = {"x": torch.randn(2, 4, 9, 9), "weight": torch.ones(4), "bias": torch.zeros(4)} | change
    with pytest.raises(ValueError, match=message):
        layer_norm2d(**given)


@pytest.mark.parametrize("side", PAIRS)
def test_a_norm_that_does_not_fit_its_convolution_is_refused_by_name(side):
    inputs, ours, _ = pair_problem(side, PATCHES, (2, 2))
    inputs[1] = torch.ones(5)
    with pytest.raises(ValueError, match=r"weight must be a tensor \(6,\), one number a channel of x, got \(5,\)"):
        ours(*inputs, eps=EPS)


INTERPRETED = """
import torch
from lean_arch.ops import use
from lean_arch.ops.layer_norm2d import kernels
from tests.ops.test_layer_norm2d import LAYOUTS, SHAPES, compare, problem

new_empty = torch.Tensor.new_empty
torch.Tensor.new_empty = lambda *size, **more: new_empty(*size, **more).fill_(torch.nan)
kernels.TILE, kernels.PROGRAMS = 512, 3  # several tiles a program, and a ragged one
with use("triton"):
    for layout in LAYOUTS:
        for shape in ((2, 19, 7, 5), (2, 33, 1, 1)):
            compare(problem(shape, torch.float32, layout), 4e-6)
        x, weight, bias = problem((2, 9, 3, 5), torch.float16, layout)
        compare((x[:, 2:7], weight[2:7]), 1e-3, far_layout=True)
        compare((x,), 1e-3)
    x, weight, bias = problem((2, 9, 3, 5))
    x = x.detach().half()
    compare((x.requires_grad_(), weight, bias), 1e-3)
    got = kernels.backward(torch.ones_like(x), x, weight, bias, 1e-3, [False, True, False])
    assert got[0] is None and got[2] is None and got[1].isfinite().all()
    got = kernels.backward(torch.ones_like(x), x, weight, bias, 1e-3, [True, False, False])
    assert got[1] is None and got[0].isfinite().all()
print("right")
"""


def test_triton_interpreted():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("x", "message"),
    [(torch.randn(1, 2, 3, 3).double(), "float64; Triton"), (torch.randn(1, 5000, 1, 1), "x has 5000 channels")],
)
def test_triton_refuses_by_name(x, message):
    kernels = pytest.importorskip("lean_arch.ops.layer_norm2d.kernels")
    with pytest.raises(ValueError, match=message):
        kernels.forward(x, None, None, EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 768, 7, 7), (1, 4096, 5, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_on_a_gpu(dtype, shape, layout):
    with use("triton"):
        compare([t.detach().cuda().requires_grad_() for t in problem(shape, dtype, layout)], 2 * TOLERANCE[dtype])
