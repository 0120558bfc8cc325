"""BatchNorm, activation and the convolution behind them: values and every gradient against the paper in float64."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from lean_arch.ops import plain_convolution, use
from lean_arch.ops.norm_act import op, portable, reference
from lean_arch.ops.norm_act.activations import ACTIVATIONS, MODULES
from lean_arch.ops.norm_act.op import Settings, Source, activate, batch_norm_act, convolve
from lean_arch.ops.plain_convolution import Geometry
from lean_arch.ops.targets import TARGETS
from tests.ruler import peak_bytes

LAYOUTS = torch.contiguous_format, torch.channels_last
EPS = 1e-3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CORNERLESS = 57, 59  # a size at which no number falls so near a corner of an activation that rounding picks the slope
POINTWISE = Geometry((1, 1), (0, 0), (1, 1), 1)
GEOMETRIES = {  # of 6 channels: kernel size, outputs, geometry
    "1x1": (1, 5, POINTWISE),
    "3x3": (3, 4, Geometry((1, 1), (1, 1), (1, 1), 1)),
    "two groups, halved": (3, 4, Geometry((2, 2), (1, 1), (1, 1), 2)),
    "depthwise": (5, 6, Geometry((1, 1), (2, 2), (1, 1), 6)),
    "depthwise, uneven": (3, 6, Geometry((2, 1), (2, 1), (2, 1), 6)),
    "depthwise, two each": (3, 12, Geometry((1, 1), (1, 1), (1, 1), 6)),
}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Several slices, and ragged ones, at the sizes of these tests; those of the blocks go whole."""
    cut = plain_convolution.slices
    monkeypatch.setattr(op, "slices", lambda x, elements=0: cut(x, elements=1000))
    monkeypatch.setattr(portable, "slices", lambda x, dim, elements: cut(x, dim, 1000))
    monkeypatch.setattr(portable, "WHOLE", 100)


def error(got, want):
    got = got.to(want.device)
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def problem(geometry="3x3", batch=5, size=(9, 7), dtype=torch.float64, layout=torch.contiguous_format, seed=0):
    """x, weight and bias of the norm, filters and bias of the convolution, and what the means are multiplied by."""
    kernel, outputs, options = GEOMETRIES[geometry]
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, 6, *size), (6,), (6,), (outputs, 6 // options.groups, kernel, kernel), (outputs,), (6, 1, 1)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    tensors[0] = tensors[0].mul_(2).add_(0.5).to(memory_format=layout)
    return [t.requires_grad_() for t in tensors], options


def in_dtype(dtype, layout, device="cpu", size=(7, 9), affine=True, geometry="1x1"):
    """A problem whose map alone is of `dtype`, as between convolutions under autocast, and the same in float64."""
    tensors, options = problem(geometry, 3, size, dtype, layout)
    if not affine:
        tensors[1:3] = None, None
    exact = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    wide = reference.wide(dtype)
    tensors = [
        None if t is None else t.detach().to(device, wide if number else dtype).requires_grad_()
        for number, t in enumerate(tensors)
    ]
    return tensors, exact, options


def statistics(dtype=torch.float64):
    return torch.linspace(-1, 1, 6, dtype=dtype), torch.linspace(0.5, 2, 6, dtype=dtype)


def lean(tensors, geometry, act, frozen=False, gated=False):
    x, weight, bias, filters, offset, scale = tensors
    running = [t.to(filters) for t in statistics()] if frozen else (None, None)
    a = activate(x, weight, bias, Settings(*running, not frozen, 0.1, EPS, act), pool=gated)
    return convolve(a, filters, offset, geometry, torch.sigmoid(a.pooled * scale) if gated else None)


def paper(tensors, geometry, act, frozen=False, gated=False):
    x, weight, bias, filters, offset, scale = tensors
    one = x.new_ones(6)
    a = reference.batch_norm_act(
        x, one if weight is None else weight, 0 * one if bias is None else bias, EPS, act, *statistics() * frozen
    )
    if gated:
        a = a * torch.sigmoid(a.mean((2, 3), keepdim=True) * scale)
    return F.conv2d(a, filters, offset, *geometry)


def compare(got, want, tensors, others, tolerance):
    """Values, and gradients by a random upstream gradient."""
    assert error(got, want) <= tolerance, "result"
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = [(t, o) for t, o in zip(tensors, others) if t is not None]
    ours = torch.autograd.grad(got, [t for t, _ in pairs], upstream.to(got), allow_unused=True)
    theirs = torch.autograd.grad(want, [o for _, o in pairs], upstream, allow_unused=True)
    for number, (g, w, (tensor, _)) in enumerate(zip(ours, theirs, pairs)):
        assert (g is None) == (w is None), number
        if g is not None:
            assert g.dtype == tensor.dtype
            # an output that does not see the shift of a channel: the gradient is rounding alone
            assert error(g, w) <= tolerance or (g.to(w) - w).norm() <= tolerance * upstream.norm(), number


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_values_and_gradients(act, geometry, layout, frozen):
    for gated in (False, True):
        tensors, options = problem(geometry, layout=layout)
        compare(
            lean(tensors, options, act, frozen, gated),
            paper(tensors, options, act, frozen, gated),
            tensors,
            tensors,
            1e-12,
        )


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_reference_runs_too(dtype, act):
    for layout, frozen, gated in ((0, False, True), (1, True, True), (1, False, False)):
        tensors, exact, options = in_dtype(dtype, LAYOUTS[layout])
        with use("reference"):
            got = lean(tensors, options, act, frozen, gated)
        compare(got, paper(exact, options, act, frozen, gated), tensors, exact, TOLERANCE[dtype])


@examples(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape(data):
    draw = data.draw
    act, geometry, layout = (draw(st.sampled_from(list(names))) for names in (ACTIVATIONS, GEOMETRIES, LAYOUTS))
    frozen, gated, affine = (draw(st.booleans()) for _ in range(3))
    batch, *size = (draw(st.integers(1, high)) for high in (9, 12, 12))
    batch += batch * size[0] * size[1] < 4  # a variance of next to nothing magnifies rounding
    tensors, options = problem(geometry, batch + (not frozen), size, layout=layout, seed=draw(st.integers(0, 99)))
    if not affine:
        tensors[1:3] = None, None
    results = [f(tensors, options, act, frozen, gated) for f in (lean, paper)]
    compare(*results, tensors, tensors, 1e-10)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_values_for_anybody(act, affine, frozen, layout):
    x, weight, bias = problem(layout=layout)[0][:3]
    one = x.new_ones(6)
    inputs = (weight, bias) if affine else (None, None)
    running = statistics() if frozen else (None, None)
    got = batch_norm_act(x, *inputs, Settings(*running, not frozen, 0.1, EPS, act))
    want = reference.batch_norm_act(x, *(inputs if affine else (one, 0 * one)), EPS, act, *statistics() * frozen)
    assert got.is_contiguous(memory_format=layout)
    compare(got, want, [x, *inputs], [x, *inputs], 1e-12)
    grad = torch.randn_like(got)
    kept = grad.clone()
    torch.autograd.grad(batch_norm_act(x, *inputs, Settings(*running, not frozen, 0.1, EPS, act)), x, grad)
    assert torch.equal(grad, kept)  # someone else's


@pytest.mark.parametrize("momentum", [0.1, 1.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("act", set(MODULES.values()))
def test_the_bits_of_torch(act, frozen, momentum):
    """Of nn.BatchNorm2d, the activation's module and a convolution, with the batch in one slice."""
    tensors, options = problem(dtype=torch.float32, batch=2)
    x, weight, bias, filters, offset, _ = tensors
    own, others = statistics(torch.float32), statistics(torch.float32)
    module = next(known for known, name in MODULES.items() if name == act)()

    def textbook():
        return module(F.batch_norm(x, *others, weight, bias, not frozen, momentum, EPS))

    settings = Settings(*own, not frozen, momentum, EPS, act)
    pairs = [
        (batch_norm_act(x, weight, bias, settings), textbook(), tensors[:3]),
        (
            convolve(activate(x, weight, bias, settings), filters, offset, options),
            F.conv2d(textbook(), filters, offset, *options),
            tensors[:5],
        ),
    ]
    for got, want, inputs in pairs:
        assert torch.equal(got, want)
        upstream = torch.randn_like(want)
        grads = (torch.autograd.grad(result, inputs, upstream) for result in (got, want))
        assert all(map(torch.equal, *grads))
    assert all(map(torch.equal, own, others))
    assert frozen == torch.equal(own[0], statistics(torch.float32)[0])


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("first", ["3x3", "depthwise"])
def test_a_source_computes_the_norms_input_again(first, act):
    """conv, norm, conv, norm, conv: neither norm's input is kept, and the second's needs the first's."""
    torch.manual_seed(0)
    kernel, _, geometry = GEOMETRIES[first]
    x, weight, bias = problem()[0][:3]
    filters = [
        torch.randn(6, 6 // g.groups, k, k, dtype=x.dtype, requires_grad=True)
        for k, g in ((kernel, geometry), (1, POINTWISE), (1, POINTWISE))
    ]
    gate = torch.rand(5, 6, 1, 1, dtype=x.dtype, requires_grad=True)
    tensors = [x, weight, bias, *filters, gate]
    settings = Settings(None, None, True, 0.1, EPS, act)

    def chained():
        z = convolve(x, filters[0], None, geometry)
        one = Source(z, x.detach(), filters[0], None, geometry, None)
        a = activate(z, weight, bias, settings, source=one)
        z = convolve(a, filters[1], None, POINTWISE, gate)
        two = Source(z, a.recipe, filters[1], None, POINTWISE, gate)
        result = convolve(activate(z, weight, bias, settings, source=two), filters[2], None, POINTWISE)
        one.drop()
        two.drop()
        return result

    a = reference.batch_norm_act(F.conv2d(x, filters[0], None, *geometry), weight, bias, EPS, act)
    a = reference.batch_norm_act(F.conv2d(a * gate, filters[1]), weight, bias, EPS, act)
    compare(chained(), F.conv2d(a, filters[2]), tensors, tensors, 1e-12)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("geometry", ["1x1", "depthwise"])
@pytest.mark.parametrize("act", ["relu6", "silu", "hardswish"])
def test_autocast_is_as_near_as_the_textbook(act, geometry, gated):
    """To float64, over many problems: a slice's share of a sum is rounded where the processor computes in bfloat16."""
    module = next(known for known, name in MODULES.items() if name == act)()
    torch.manual_seed(0)
    errors = torch.zeros(2, 5)
    for seed in range(24):
        tensors, options = problem(geometry, dtype=torch.float32, seed=seed)
        doubles = [t.detach().double().requires_grad_() for t in tensors]
        exact = paper(doubles, options, act, gated=gated)
        upstream = torch.randn(exact.shape, dtype=torch.float64)
        wanted = exact, *torch.autograd.grad(exact, doubles[:5], upstream)

        def textbook(x, weight, bias, filters, offset, scale):
            a = module(F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS))
            a = a * torch.sigmoid(a.mean((2, 3), keepdim=True) * scale) if gated else a
            return F.conv2d(a, filters, offset, *options)  # noqa: B023

        for row, run in enumerate((lambda *t: lean(t, options, act, gated=gated), textbook)):  # noqa: B023
            with torch.autocast("cpu", torch.bfloat16):
                result = run(tensors[0].bfloat16(), *tensors[1:])
            assert result.dtype == torch.bfloat16
            grads = torch.autograd.grad(result, tensors[:5], upstream.bfloat16())
            assert all(g.dtype == torch.float32 for g in grads)
            of_norms = sum(error(grads[i], wanted[1 + i]) for i in (1, 2))
            both = ((result, exact), *zip((grads[0], *grads[3:]), (wanted[1], *wanted[4:])))
            errors[row] += torch.tensor([of_norms, *(error(g, w) for g, w in both)])
    assert (errors[0] <= 1.06 * errors[1]).all(), errors


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [4], [5], [0, 3], [1, 5]])
def test_only_the_gradients_that_are_asked_for(wanted):
    tensors, options = problem()
    full = torch.autograd.grad(lean(tensors, options, "silu", gated=True).square().sum(), tensors)
    some = torch.autograd.grad(lean(tensors, options, "silu", gated=True).square().sum(), [tensors[i] for i in wanted])
    assert all(torch.equal(g, full[i]) for g, i in zip(some, wanted))
    for number, tensor in enumerate(tensors):
        tensor.requires_grad_(number in wanted)
    lean(tensors, options, "silu", gated=True).square().sum().backward()
    for number, tensor in enumerate(tensors):
        assert (tensor.grad is not None) == (number in wanted), number
        assert tensor.grad is None or torch.equal(tensor.grad, full[number]), number


def test_gradients_reach_what_only_the_means_reach():
    """Where the activation goes nowhere but into its means."""
    tensors, _ = problem()
    x, weight, bias = tensors[:3]
    a = activate(x, weight, bias, Settings(None, None, True, 0.1, EPS, "silu"), pool=True)
    want = reference.batch_norm_act(x, weight, bias, EPS, "silu").mean((2, 3), keepdim=True)
    compare(a.pooled, want, tensors[:3], tensors[:3], 1e-12)


def test_second_derivative_is_refused():
    tensors, options = problem()
    loss = lean(tensors, options, "silu").sum()
    (grad,) = torch.autograd.grad(loss, tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 6, 1, 1), r"\(1, 6, 1, 1\), one value a channel"), ((2, 5, 3, 3), r"x \(2, 5, 3, 3\) has 5 channels.* 6")],
)
@pytest.mark.parametrize("function", [activate, batch_norm_act])
def test_bad_input_is_refused_by_name(function, shape, message):
    for running in ((None, None), (torch.zeros(6), torch.ones(6))):
        for inputs in ((torch.ones(6), torch.zeros(6)), (None, None)):
            if any(t is not None for t in (*running, *inputs)) or "one value" in message:
                with pytest.raises(ValueError, match=message):
                    function(torch.randn(shape), *inputs, Settings(*running, True, 0.1, EPS, "relu"))


def test_the_activation_is_not_kept():
    """Kept are the norm's input and the result; a textbook step keeps the normalised map and the activation too."""
    x = torch.randn(8, 16, 32, 32, requires_grad=True)
    weight, bias, filters = (
        torch.ones(16, requires_grad=True),
        torch.zeros(16, requires_grad=True),
        torch.ones(1, 16, 1, 1),
    )
    settings = Settings(None, None, True, 0.1, EPS, "silu")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        convolve(activate(x, weight, bias, settings), filters, None, POINTWISE)
    assert {t.untyped_storage().data_ptr() for t in kept if t.numel() >= x.numel()} == {x.data_ptr()}
    step = lambda: torch.autograd.grad(  # noqa: E731
        convolve(activate(x, weight, bias, settings), filters, None, POINTWISE).sum(), [x, weight, bias]
    )
    textbook = lambda: torch.autograd.grad(  # noqa: E731
        F.conv2d(F.silu(F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS)), filters).sum(), [x, weight, bias]
    )
    assert peak_bytes(step) <= 0.75 * peak_bytes(textbook)


def by_triton(act, layout, frozen, gated, dtype, **options):
    """Like test_values_and_gradients."""
    tensors, exact, geometry = in_dtype(dtype, layout, **options)
    with use("triton"):
        got = lean(tensors, geometry, act, frozen, gated)
        compare(got, paper(exact, geometry, act, frozen, gated), tensors, exact, TOLERANCE[dtype])


CUTS = {
    "channels": lambda t: t[:, 1:4],
    "rows and columns": lambda t: t[:, :3, 2:7, 1:8],
    "turned": lambda t: t[:, 2:].mT,
    "one for all": lambda t: t[:, :1].expand(3, 3, 9, 9),
}


def strided_by_triton(device="cpu"):
    """A mean far from 0 besides, and running statistics that move on."""
    for cut in CUTS.values():
        x = (torch.randn(3, 5, 9, 9, generator=torch.Generator().manual_seed(0)) + 100).to(device)
        results = []
        for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference")):
            leaf = x.to(dtype).requires_grad_()
            running = [torch.full((3,), n, dtype=dtype, device=device) for n in (99.0, 2.0)]
            with use(backend):
                out = batch_norm_act(cut(leaf), None, None, Settings(*running, True, 0.3, EPS, "silu"))
            (grad,) = torch.autograd.grad(out.mT.mul(out.mT.detach()).sum(), leaf)
            results.append((out, grad, *running))
        assert max(map(error, *results)) <= 2e-5  # the mean's rounding makes 1e-5 of it


INTERPRETED = """
import torch
from lean_arch.ops.norm_act import kernels
from tests.ops.test_norm_act import ACTIVATIONS, LAYOUTS, by_triton, strided_by_triton

empty_like, empty = torch.Tensor.new_empty, torch.empty
torch.empty = lambda *size, **more: empty(*size, **more).fill_(torch.nan)
torch.Tensor.new_empty = lambda *size, **more: empty_like(*size, **more).fill_(torch.nan)
kernels.TILE, kernels.STEPS = 256, 2  # several stretches and tiles
for number, act in enumerate(ACTIVATIONS):
    by_triton(act, LAYOUTS[number % 2], number == 3, number != 4, torch.float32, size=(3, 5))
by_triton("hardswish", LAYOUTS[0], False, True, torch.float16, affine=False)
kernels.STEPS = 1
by_triton("hardswish", LAYOUTS[1], False, True, torch.float16, affine=False)
by_triton("gelu", LAYOUTS[1], True, False, torch.float16, size=(1, 1))
strided_by_triton()
print("right")
"""


def test_triton_interpreted():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_activation_builds_without_its_gpu(target):
    kernels = pytest.importorskip("lean_arch.ops.norm_act.kernels")
    from benchmarks.kernels import compile_build, resources

    for build in kernels.builds(TARGETS[target]):
        if (build.name, build.dtype) in (("norm_act_map", "fp16"), ("norm_act_sums", "bf16")):
            for act in ACTIVATIONS:
                changed = dataclasses.replace(build, constexprs=build.constexprs | {"ACT": act})
                _, stack, _ = resources(compile_build(changed, TARGETS[target]), TARGETS[target])
                assert stack == 0, act


def test_stretches_cover_every_pixel_once():
    kernels = pytest.importorskip("lean_arch.ops.norm_act.kernels")
    for batch, pixels, block in ((8, 49, 64), (7, 3136, 16), (1, 10**7, 256), (3, 5, 8), (300, 1, 1), (2**31, 9, 16)):
        number, images, span = kernels.stretches(batch, pixels, block)
        assert number * images * span >= batch * pixels
        assert number <= -(-batch // images) * -(-pixels // span) <= 2100
        assert span == pixels or span % block == 0


def test_triton_refuses_float64_by_name():
    kernels = pytest.importorskip("lean_arch.ops.norm_act.kernels")
    with pytest.raises(ValueError, match="float64; Triton"):
        kernels.forward(problem()[0][0], None, None, None, None, True, 0.1, EPS, "relu")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_on_a_gpu(dtype, act, layout):
    with torch.backends.cudnn.flags(allow_tf32=False):
        for frozen, gated in ((False, True), (True, True), (False, False)):
            by_triton(act, layout, frozen, gated, dtype, device="cuda", size=CORNERLESS, affine=gated)


@pytest.mark.gpu
def test_triton_on_a_gpu_strided():
    strided_by_triton("cuda")
