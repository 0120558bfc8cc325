"""linear_cross_entropy: F.cross_entropy(F.linear()) in float64, value and every gradient, without the logits."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lean_arch.ops import linear_cross_entropy, use
from lean_arch.ops.linear_cross_entropy import op, portable
from tests.ruler import allocations, peak_bytes

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, and ragged ones, at the sizes of these tests."""
    monkeypatch.setattr(portable, "ROWS", 16)
    monkeypatch.setattr(portable, "COLUMNS", 24)


def problem(tokens, size, classes, dtype=torch.float32, ignored=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, size), (classes, size), (classes,)
    x, weight, bias = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    target = torch.randint(classes, (tokens,), generator=generator)
    target[::ignored] = -100
    return x, weight, target, bias


def error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def compare(x, weight, target, bias, tolerance, **options):
    """Value and gradients by a random upstream gradient, against float64."""
    ours = linear_cross_entropy(x, weight, target, bias, **options)
    assert ours.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    inputs = [t for t in (x, weight, bias) if t is not None]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    theirs = F.cross_entropy(F.linear(*doubles), target, **options)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad(ours, inputs, upstream.to(ours))
    want = torch.autograd.grad(theirs, doubles, upstream)
    assert [g.dtype for g in got] == [t.dtype for t in inputs]
    for name, g, w in zip(("loss", "x", "weight", "bias"), (ours, *got), (theirs, *want)):
        assert error(g, w) <= tolerance, name


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_value_and_gradients(dtype, backend, label_smoothing, reduction):
    options = {"label_smoothing": label_smoothing, "reduction": reduction}
    with use(backend):
        for biased in (True, False):
            x, weight, target, bias = problem(53, 9, 61, dtype)
            compare(x, weight, target, bias if biased else None, TOLERANCE[dtype], **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bit_numbers(dtype, monkeypatch):
    """As on a CPU that has arithmetic for them."""
    monkeypatch.setattr(op, "_cpu_multiplies", lambda dtype: True)
    compare(*problem(53, 9, 61, dtype), 4 * TOLERANCE[dtype], label_smoothing=0.1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(2, 60), st.integers(2, 7), st.sampled_from([0.0, 0.3]))
def test_any_shape(tokens, size, classes, ignored, label_smoothing):
    compare(
        *problem(tokens, size, classes, torch.float64, ignored), 1e-9, label_smoothing=label_smoothing, reduction="sum"
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction):
    x, weight, target, bias = problem(6, 3, 27, torch.float64)
    torch.autograd.gradcheck(
        lambda *t: linear_cross_entropy(t[0], t[1], target, t[2], label_smoothing=0.2, reduction=reduction),
        (x, weight, bias),
    )


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_needed(needs):
    x, weight, target, bias = problem(53, 9, 61)
    compared = torch.autograd.grad(linear_cross_entropy(x, weight, target, bias), (x, weight, bias))
    for tensor, need in zip((x, weight, bias), needs):
        tensor.requires_grad_(need)
    linear_cross_entropy(x, weight, target, bias).backward()
    for tensor, need, grad in zip((x, weight, bias), needs, compared):
        assert (tensor.grad is not None) == need
        assert not need or torch.equal(tensor.grad, grad)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_all_ignored(label_smoothing):
    x, weight, target, bias = problem(20, 5, 30)
    target[:] = -100
    for reduction in ("mean", "sum"):
        ours = linear_cross_entropy(x, weight, target, bias, reduction=reduction, label_smoothing=label_smoothing)
        theirs = F.cross_entropy(
            F.linear(x, weight, bias), target, reduction=reduction, label_smoothing=label_smoothing
        )
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert all(not g.any() for g in torch.autograd.grad(ours, (x, weight, bias)))


def test_ignored_tokens_are_not_read():
    x, weight, target, bias = problem(53, 9, 61)
    x.data[target == -100] = torch.nan
    loss = linear_cross_entropy(x, weight, target, bias)
    for grad in torch.autograd.grad(loss, (x, weight, bias)):
        assert grad.isfinite().all()


def test_classes_masked_by_their_bias():
    """A whole stripe of the vocabulary at -inf, as padding to a round number leaves it."""
    x, weight, target, bias = problem(53, 9, 80, torch.float64)
    bias.data[30:] = -torch.inf
    compare(x, weight, target.where(target == -100, target % 30), bias, 1e-12)


def test_not_contiguous_and_another_ignore_index():
    x, weight, target, bias = problem(53, 9, 61, torch.float64)
    x, weight = (t.detach().t().contiguous().t().requires_grad_() for t in (x, weight))
    compare(x, weight, target.where(target != -100, 3), bias, 1e-12, ignore_index=3)


def test_autocast_keeps_no_copy_of_the_weight():
    x, weight, target, bias = problem(53, 9, 61)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x.bfloat16(), weight, target, bias)
        loss.backward()  # inside: no product of ours is cast again
    assert weight.grad.dtype == torch.float32
    exact = F.cross_entropy(F.linear(x.detach().double(), weight.double(), bias.double()), target)
    assert error(loss, exact) < 1e-2
    if not op._cpu_multiplies(torch.bfloat16):  # then nothing but x was rounded
        rounded = F.cross_entropy(F.linear(x.detach().bfloat16().double(), weight.double(), bias.double()), target)
        assert error(loss, rounded) < 1e-6


def test_same_bits_twice_and_graphs_that_are_kept():
    x, weight, target, bias = problem(53, 9, 61)
    loss = linear_cross_entropy(x, weight, target, bias)
    first = torch.autograd.grad(loss, (x, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight, bias))
    again = torch.autograd.grad(linear_cross_entropy(x, weight, target, bias), (x, weight, bias))
    for one, two, three in zip(first, second, again):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_second_derivative_is_refused():
    x, weight, target, _ = problem(20, 5, 30)
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("biased", [True, False])
def test_opcheck(biased):
    x, weight, target, bias = problem(20, 5, 30)
    arguments = (x, weight, bias if biased else None, target, -100, 0.1, torch.float32, "torch")
    torch.library.opcheck(torch.ops.lean_arch.linear_cross_entropy.default, arguments)


def test_compiles_whole():
    x, weight, target, bias = problem(20, 5, 30)

    def step(x, weight, bias):
        return linear_cross_entropy(x * 2, weight, target, bias, label_smoothing=0.1).tanh()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(*(torch.autograd.grad(f(x, weight, bias), (x, weight, bias)) for f in (compiled, step))):
        assert error(got, want.double()) < 1e-6


@pytest.mark.parametrize("frozen", [False, True])
def test_flops_are_those_of_the_products(frozen):
    x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(11, 5, requires_grad=not frozen)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, weight, torch.arange(6)).backward()
    assert counter.get_total_flops() == (3 if frozen else 4) * 2 * 6 * 11 * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_logits_in_memory(dtype, monkeypatch):
    monkeypatch.undo()  # tiles as they are
    sizes = [(256, 16, 20_000), (512, 16, 20_000), (256, 16, 40_000)]
    extra = []
    for tokens, size, classes in sizes:
        x, weight, target, bias = problem(tokens, size, classes, dtype)
        step = lambda: linear_cross_entropy(x, weight, target, bias).backward()  # noqa: B023, E731
        step()
        assert max(allocations(step)) < tokens * classes  # of bytes: a quarter of the float32 logits
        gradients = sum(t.nbytes for t in (x, weight, bias))
        rows = 3 * 4 * tokens * size + 64 * tokens  # x picked, its gradient in float32, rows of numbers
        extra.append(peak_bytes(step) - gradients - rows - 4 * classes)
    assert max(extra) <= 4 * portable.ROWS * portable.COLUMNS + 2**20, extra


@pytest.mark.parametrize("needs", [[True, True, True], [True, False, False], [False, True, False]])
@pytest.mark.parametrize(
    ("shape", "types"),
    [((1000, 96, 5003), "fff"), ((6000, 16, 300), "bbf"), ((1000, 96, 5003), "bff"), ((300, 32, 700), "hhh")],
)
def test_scratch_is_known(shape, types, needs, monkeypatch):
    """What the planner adds for the operator's own temporaries: x, weight and products of these types."""
    monkeypatch.undo()  # tiles as they are
    tokens, size, classes = shape
    of_x, of_weight, dtype = ({"f": torch.float32, "b": torch.bfloat16, "h": torch.float16}[one] for one in types)
    tensors = [torch.randn(tokens, size).to(of_x), torch.randn(classes, size).to(of_weight), torch.randn(classes)]
    options = torch.randint(classes, (tokens,)), -100, 0.1, dtype, "torch"
    ours = torch.ops.lean_arch
    losses, lse = ours.linear_cross_entropy(*tensors, *options)
    took = peak_bytes(lambda: ours.linear_cross_entropy(*tensors, *options)) - losses.nbytes - lse.nbytes
    assert 0.98 * took < portable.scratch_bytes(*tensors[:2], dtype) < 1.05 * took
    took = peak_bytes(lambda: ours.linear_cross_entropy_backward(losses, lse, *tensors, *options, needs))
    took -= sum(t.nbytes for t, need in zip(tensors, needs) if need)
    assert 0.98 * took < portable.scratch_bytes(*tensors[:2], dtype, needs) < 1.05 * took


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(2, 4, 5)}, "x must be a tensor"),
        ({"x": torch.ones(20, 5, dtype=torch.int64)}, "x is torch.int64"),
        ({"weight": torch.randn(30, 6)}, "weight is"),
        ({"weight": torch.randn(30, 5).bfloat16()}, "weight is torch.bfloat16"),
        ({"target": torch.zeros(19, dtype=torch.int64)}, "target must be"),
        ({"target": torch.zeros(20, dtype=torch.int32)}, "target must be"),
        ({"target": torch.full((20,), 30)}, "target 30 is out of range"),
        ({"target": torch.full((20,), -1)}, "target -1 is out of range"),
        ({"bias": torch.randn(29)}, "bias must be"),
        ({"bias": torch.randn(30).double()}, "bias is torch.float64"),
        ({"label_smoothing": "x"}, "label_smoothing 'x' must be a number"),
        ({"ignore_index": None}, "ignore_index None must be a whole number"),
        ({"label_smoothing": 1.0}, "label_smoothing 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing -0.1"),
        ({"reduction": "max"}, "reduction 'max'"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    x, weight, target, bias = problem(20, 5, 30)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{"x": x, "weight": weight, "target": target, "bias": bias} | change)


INTERPRETED = """
import torch
from lean_arch.ops import use
from lean_arch.ops.linear_cross_entropy import op, portable
from tests.ops.test_linear_cross_entropy import compare, problem

op._cpu_multiplies = lambda dtype: True
portable.ROWS, portable.COLUMNS = 40, 96
with use("triton"):
    for dtype, tolerance in ((torch.float32, 5e-6), (torch.float16, 4e-3)):
        for shape in ((7, 5, 11), (53, 33, 205), (40, 64, 96)):
            x, weight, target, bias = problem(*shape, dtype)
            compare(x, weight, target, bias, tolerance, label_smoothing=0.1)
            compare(x, weight, target, None, tolerance, reduction="none")
print("right")
"""


def test_triton_interpreted():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_on_a_gpu(dtype, monkeypatch):
    monkeypatch.undo()
    for label_smoothing in (0.0, 0.1):
        x, weight, target, bias = (t.detach().cuda() for t in problem(1000, 96, 5003, dtype))
        for tensor in (x, weight, bias):
            tensor.requires_grad_()
        got, want = [], []
        for backend, results in (("triton", got), ("reference", want)):
            with use(backend):
                loss = linear_cross_entropy(x, weight, target, bias, label_smoothing=label_smoothing)
            results += [loss, *torch.autograd.grad(loss, (x, weight, bias))]
        assert all(error(g, w.double()) <= 4 * TOLERANCE[dtype] for g, w in zip(got, want))
