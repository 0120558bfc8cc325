"""memory_lookup: a gather and a sum in float64, value and every gradient, nothing of the table's size."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_arch.ops import memory_lookup, use
from lean_arch.ops.memory_lookup.op import places
from tests.ruler import allocations, peak_bytes

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(dtype=torch.float32, tokens=13, reads=6, slots=40, size=7, trained=9, seed=0):
    """values, index, weights, rows, row_values; two of the rows and a column of index are none."""
    generator = torch.Generator().manual_seed(seed)
    values, weights, row_values = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((slots, size), (tokens, reads), (trained, size))
    )
    index = torch.randint(slots, (tokens, reads), generator=generator)
    rows = torch.randperm(slots, generator=generator)[:trained]
    rows[trained // 2 : trained // 2 + 2] = -1
    index[:, reads // 2 : reads // 2 + 1] = -1
    return values, index, weights, rows, row_values


def exact(values, index, weights, rows=None, row_values=None):
    if rows is not None:
        there = rows >= 0
        values = values.index_add(0, rows[there], row_values[there])
    return (weights[..., None] * values[index.clamp(min=0)] * (index >= 0)[..., None]).sum(1)


def error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def compare(values, index, weights, rows, row_values, tolerance, sparse=True):
    inputs = [t.detach().clone().requires_grad_() for t in (values, weights, row_values) if t is not None]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    got = memory_lookup(inputs[0], index, inputs[1], rows, *inputs[2:], sparse=sparse)
    want = exact(doubles[0], index, doubles[1], rows, *doubles[2:])
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream = upstream.to(got.device, got.dtype)
    gradients = torch.autograd.grad(got, inputs, upstream)
    assert gradients[0].is_sparse == sparse
    assert [g.dtype for g in gradients] == [t.dtype for t in inputs]
    assert got.dtype == values.dtype
    wanted = torch.autograd.grad(want, doubles, upstream.double())
    for name, g, w in zip(("result", "values", "weights", "row_values"), (got, *gradients), (want, *wanted)):
        assert error(g.to_dense() if g.is_sparse else g, w) <= tolerance, name


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("backend", "dtype"), [*(("torch", d) for d in TOLERANCE), ("reference", torch.float32)])
def test_value_and_gradients(backend, dtype, trained):
    values, index, weights, rows, row_values = problem(dtype)
    some = (rows, row_values) if trained else (None, None)
    with use(backend):
        compare(values, index, weights, *some, TOLERANCE[dtype])
        compare(values, index, weights, *some, TOLERANCE[dtype], sparse=False)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_size(data):
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    slots = number(1, 50)
    compare(*problem(torch.float32, number(0, 9), number(0, 7), slots, number(1, 20), number(0, slots)), 5e-6)


def test_gradcheck():
    values, index, weights, rows, row_values = problem(torch.float64, slots=11, trained=4)
    inputs = [t.requires_grad_() for t in (values, weights, row_values)]
    torch.autograd.gradcheck(lambda v, w, r: memory_lookup(v, index, w, rows, r, sparse=False), inputs)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_needed(needs):
    values, index, weights, rows, row_values = problem()
    inputs = [t.requires_grad_() for t in (values, weights, row_values)]
    compared = torch.autograd.grad(memory_lookup(values, index, weights, rows, row_values).square().sum(), inputs)
    for tensor, need in zip(inputs, needs):
        tensor.requires_grad_(need)
    memory_lookup(values, index, weights, rows, row_values).square().sum().backward()
    for tensor, need, grad in zip(inputs, needs, compared):
        assert (tensor.grad is not None) == need
        assert not need or torch.equal(tensor.grad.to_dense(), grad.to_dense())


def test_float32_beside_16_bits():
    """Weights and trained rows of float32 over a table of bfloat16: gradients come in float32."""
    values, index, weights, rows, row_values = problem()
    compare(values.bfloat16(), index, weights, rows, row_values, 8e-3)


def test_trained_rows_of_none():
    values, index, weights, _, row_values = problem()
    none = torch.full((len(row_values),), -1)
    assert torch.equal(memory_lookup(values, index, weights, none, row_values), memory_lookup(values, index, weights))
    assert torch.equal(places(index, none[:0]), torch.full_like(index, -1))


def test_same_bits_twice():
    inputs = problem(torch.bfloat16, tokens=200, slots=5, trained=5)
    tensors = [inputs[i].requires_grad_() for i in (0, 2, 4)]
    one, two = (torch.autograd.grad(memory_lookup(*inputs).float().square().sum(), tensors) for _ in range(2))
    for a, b in zip(one, two):
        assert torch.equal(a.to_dense(), b.to_dense())


def test_gradient_of_the_table_is_compact():
    values, index, weights, *_ = problem()
    (grad,) = torch.autograd.grad(memory_lookup(values.requires_grad_(), index, weights).sum(), values)
    assert grad.is_coalesced()
    assert torch.equal(grad.indices()[0], index[index >= 0].unique())
    torch.sparse_coo_tensor(grad.indices(), grad.values(), grad.shape, check_invariants=True)


@pytest.mark.parametrize("trained", [True, False])
def test_nothing_of_the_tables_size_is_allocated(trained):
    """A step over a table of 64 MiB takes 3% of it, and what every reader reads is not copied for it."""
    values, index, weights, rows, row_values = problem(tokens=256, reads=32, slots=2**18, size=64, trained=500)
    rows = index.unique()[1:501]
    values.requires_grad_(not trained)
    weights.requires_grad_()
    some = (rows, row_values.requires_grad_()) if trained else ()

    def step():
        memory_lookup(values, index, weights, *some).square().sum().backward()
        values.grad = weights.grad = row_values.grad = None

    copies = index.numel() * values.shape[1] * 4
    compact = 0 if trained else len(index.unique()) * values.shape[1] * 4
    assert max(allocations(step)) <= max(compact, 2**17)
    assert peak_bytes(step) < compact + copies / 2
    assert peak_bytes(step) < values.nbytes * (0.03 if trained else 0.06)


def test_second_derivative_is_refused():
    values, index, weights, *_ = problem()
    (grad,) = torch.autograd.grad(
        memory_lookup(values, index, weights.requires_grad_()).square().sum(), weights, create_graph=True
    )
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("sparse", [True, False])
def test_opcheck(sparse):
    values, index, weights, rows, _ = problem()
    ops = torch.ops.lean_arch
    # a sparse gradient is beyond what traces can hold
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    more = () if sparse else ("test_aot_dispatch_dynamic",)
    arguments = (values.requires_grad_(), places(index, index.unique()[::2]), weights.requires_grad_(), sparse, "torch")
    torch.library.opcheck(ops.memory_lookup.default, arguments, test_utils=(*utilities, *more))
    torch.library.opcheck(ops.memory_places.default, (index, rows))


def test_compiles_whole():
    """With the table frozen, or a dense gradient for it; torch.compile knows no sparse gradients."""
    values, index, weights, rows, row_values = problem()
    inputs = [t.requires_grad_() for t in (values, weights, row_values)]

    def step(values, weights, row_values):
        return memory_lookup(values * 2, index, weights, rows, row_values, sparse=False).tanh()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(*(torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, step))):
        assert error(got, want.double()) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.randn(5)}, "values must be a tensor"),
        ({"values": torch.ones(9, 4, dtype=torch.int64)}, "values is torch.int64"),
        ({"index": torch.zeros(2, 3)}, "index is torch.float32; int64"),
        ({"index": torch.full((2, 3), 9)}, "index goes up to 9; values have the rows 0 to 8"),
        ({"weights": torch.randn(2, 4)}, "weights are"),
        ({"weights": torch.randn(2, 3, device="meta")}, "weights is on meta"),
        ({"rows": torch.tensor([1])}, "rows and row_values come together"),
        ({"rows": torch.tensor([1, 1]), "row_values": torch.randn(2, 4)}, "rows hold 1 twice"),
        ({"rows": torch.tensor([1]), "row_values": torch.randn(2, 4)}, r"row_values are \(2, 4\)"),
        ({"rows": torch.tensor([1]), "row_values": torch.randn(1, 4).half()}, "row_values are torch.float16"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    given = {"values": torch.randn(9, 4), "index": torch.zeros(2, 3, dtype=torch.int64), "weights": torch.randn(2, 3)}
    with pytest.raises(ValueError, match=message):
        memory_lookup(**given | change)


INTERPRETED = """
import torch
from lean_arch.ops import use
from lean_arch.ops.memory_lookup import kernels
from tests.ops.test_memory_lookup import compare, problem

empty_like = torch.Tensor.new_empty
torch.Tensor.new_empty = lambda *size, **more: empty_like(*size, **more).fill_(-7)
kernels.BLOCK_V = 4  # several tiles
with use("triton"):
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 1e-3)):
        compare(*problem(dtype, reads=11), tolerance)
        compare(*problem(dtype), tolerance, sparse=False)
    values, index, weights, rows, row_values = problem()
    compare(values.half(), index, weights, rows, row_values, 1e-3)
    compare(values.t().contiguous().t(), index, weights, None, None, 2e-6)
    compare(*problem(tokens=0), 2e-6)
print("right")
"""


def test_triton_interpreted():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


def test_triton_refuses_float64_by_name():
    kernels = pytest.importorskip("lean_arch.ops.memory_lookup.kernels")
    values, index, weights, *_ = problem(torch.float64)
    with pytest.raises(ValueError, match=r"values is torch\.float64; Triton"):
        kernels.forward(values, index, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_on_a_gpu(dtype, sparse):
    inputs = [t.cuda() for t in problem(dtype, tokens=300, reads=32, slots=5000, size=520, trained=700)]
    with use("triton"):
        compare(*inputs, 2 * TOLERANCE[dtype], sparse=sparse)
