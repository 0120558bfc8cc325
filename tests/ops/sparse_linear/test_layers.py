"""Sparse updates of linear layers, convolutions and embeddings: value and every gradient against a dense weight."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from lean_arch.ops import use
from lean_arch.ops.sparse_linear import Columns, Entries, Rows, reference, sparse, sparse_conv2d, sparse_linear
from tests.ops.sparse_linear.problems import TOLERANCE, compare, dense, error, problem, structure_of

KINDS = "columns", "rows", "blocks", "entries"


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Several of them, and ragged ones, at the sizes of these tests."""
    monkeypatch.setattr(sparse, "SCRATCH", {True: 300, False: 300})


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids="+".join)
@pytest.mark.parametrize("layer", ["linear", "conv1d", "conv2d", "embedding"])
def test_value_and_gradients(layer, kinds, backend):
    with use(backend):
        compare(problem(layer, kinds, dtype=torch.float64), 1e-13)


@pytest.mark.parametrize("layer", ["linear", "conv2d", "embedding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes(kind, dtype, layer):
    out = compare(problem(layer, (kind,), dtype=dtype), TOLERANCE[dtype])
    assert out.dtype == dtype


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_linear(data):
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    size = number(1, 4), number(1, 4)
    weight = number(size[0], 12), number(size[1], 12)
    lead = data.draw(st.lists(st.integers(0, 5), max_size=3))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), max_size=3))
    compare(
        problem(
            "linear", kinds, x=(*lead, weight[1]), weight=weight, dtype=torch.float64,
            seed=number(0, 99), size=size, biased=data.draw(st.booleans()),
        ),
        1e-12,
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_convolution(data):
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    pair = lambda low, high: (number(low, high), number(low, high))  # noqa: E731
    size, kernel, stride, dilation, padding = pair(1, 3), pair(1, 4), pair(1, 3), pair(1, 3), pair(0, 3)
    groups = data.draw(st.sampled_from((1, 1, 2, 3)))
    inputs, outputs = number(size[1], 5), groups * number(size[0], 4)
    room = [max(number(1, 9), d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation)]
    kinds = data.draw(st.lists(st.sampled_from(KINDS if groups == 1 else ("columns", "rows", "entries")), max_size=3))
    compare(
        problem(
            "conv2d", kinds, stride, padding, dilation, groups, x=(number(0, 3), inputs * groups, *room),
            weight=(outputs, inputs, *kernel), dtype=torch.float64, seed=number(0, 99), size=size,
        ),
        1e-12,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_embedding(data):
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    size = number(1, 3), number(1, 3)
    weight = number(size[0], 9), number(size[1], 9)
    padding = data.draw(st.none() | st.integers(-weight[0], weight[0] - 1))
    ids = data.draw(st.lists(st.integers(0, 6), max_size=2))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    compare(
        problem("embedding", kinds, padding, x=ids, weight=weight, dtype=torch.float64, seed=number(0, 99), size=size),
        1e-12,
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_positions_are_the_values_places(data):
    groups = data.draw(st.sampled_from((1, 2)))
    kernel = data.draw(st.sampled_from(((), (3,), (2, 3))))
    shape = (2 * data.draw(st.integers(1, 4)), data.draw(st.integers(3, 7)), *kernel)
    kind = data.draw(st.sampled_from(KINDS if groups == 1 else ("columns", "rows", "entries")))
    structure = structure_of(kind, shape, torch.Generator().manual_seed(data.draw(st.integers(0, 9))), groups)
    values = torch.randn(structure.values_shape(shape, groups))
    positions = structure.positions(shape, groups)
    assert positions.shape == values.shape
    merged = torch.zeros(torch.Size(shape).numel()).index_add(0, positions.flatten(), values.flatten())
    assert torch.equal(merged.view(shape), dense(values, structure, shape, groups))
    structure.check(shape, groups)


@pytest.mark.parametrize("layer", ["linear", "conv2d"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_gradients_that_are_needed(kind, layer):
    given = problem(layer, (kind,))
    compared = torch.autograd.grad(given.ours().square().sum(), given.trained)
    for only in range(3):
        leaves = [given.x, given.bias, given.updates[0][0]]
        for n, tensor in enumerate(leaves):
            tensor.grad = None
            tensor.requires_grad_(n == only)
        given.ours().square().sum().backward()
        assert [t.grad is not None for t in leaves] == [n == only for n in range(3)]
        assert error(leaves[only].grad, compared[only].double()) < 1e-6
        for tensor in leaves:
            tensor.requires_grad_()


@pytest.mark.parametrize("layer", ["linear", "conv2d"])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind, layer):
    """Result in autocast's dtype, gradients in each tensor's own."""
    given = problem(layer, (kind,))
    with torch.autocast("cpu", torch.bfloat16):
        out = given.ours()
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out, given.trained, torch.ones_like(out))
    exact = given.map(torch.Tensor.double)
    for grad, want, t in zip(
        (out, *grads), (w := exact.theirs(), *torch.autograd.grad(w.sum(), exact.trained)), (out, *given.trained)
    ):
        assert grad.dtype == t.dtype
        assert error(grad, want) < 1e-2


def test_autocast_leaves_float64_alone():
    given = problem("linear", KINDS, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert compare(given, 1e-13).dtype == torch.float64


@pytest.mark.parametrize("layer", ["linear", "conv2d", "embedding"])
def test_values_may_be_finer_than_the_weight(layer):
    """A change that the weight's own dtype is too coarse for still reaches the result."""
    given = problem(layer, KINDS).map(lambda t: t.bfloat16() if t.dim() else t)
    given.updates = [(v.detach().float().requires_grad_(), s) for v, s in given.updates]
    assert compare(given, TOLERANCE[torch.bfloat16]).dtype == torch.bfloat16
    weight, x = torch.full((1, 4), 256.0).bfloat16(), torch.tensor([[1.0, -1, 1, -1]]).bfloat16()
    small = torch.full((4,), 0.25)
    out = sparse_linear(x, weight, None, [(small[:1], Entries(torch.tensor([2])))])
    assert out.item() == 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_strides_of_any_kind(kind):
    given = problem("linear", (kind,), x=(5, 13, 4, 3), weight=(10, 13), biased=False)
    x = given.x.detach().transpose(1, 3)[:, ::2].requires_grad_()
    given.x, given.weight = x, given.weight.t().contiguous().t()
    compare(given, TOLERANCE[torch.float32])
    given = problem("conv2d", (kind,), 2, 1)
    given.x = given.x.detach().to(memory_format=torch.channels_last).requires_grad_()
    compare(given, TOLERANCE[torch.float32])


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(("kernel", "dilation"), [((3, 3), 1), ((4, 1), 1), ((2, 4), 3)])
def test_padding_by_name(kernel, dilation, padding):
    compare(problem("conv2d", KINDS, 1, padding, dilation, weight=(8, 6, *kernel), x=(2, 6, 13, 12)), 3e-6)
    compare(problem("conv1d", KINDS, 1, padding, dilation, weight=(8, 6, kernel[0]), x=(2, 6, 13)), 3e-6)


@pytest.mark.parametrize("options", [(2, 1, 1, 6), ((2,), (1,), (2,), 2)])
def test_conv1d_of_groups(options):
    compare(problem("conv1d", ("columns", "rows", "entries"), *options, weight=(12, 6 // options[3], 3)), 3e-6)


@pytest.mark.parametrize("layer", ["linear", "conv2d", "embedding"])
def test_same_bits_twice(layer):
    given = problem(layer, KINDS, dtype=torch.bfloat16)
    one, two = (torch.autograd.grad(given.ours().float().square().sum(), given.trained) for _ in range(2))
    assert all(map(torch.equal, one, two))


def test_changed_indices_are_seen():
    """What is derived from an index is remembered only while it stays as it is."""
    given = problem("linear", ("entries", "blocks"), dtype=torch.float64)
    compare(given, 1e-13)
    for _, structure in given.updates:
        if isinstance(structure, Entries):
            structure.index.copy_(structure_of("entries", (10, 13), torch.Generator().manual_seed(5)).index)
        else:
            structure.cols.copy_(structure.cols.flip(0))
            structure.rows.copy_(structure.rows.flip(0))
    compare(given, 1e-13)


def test_plans_live_no_longer_than_their_indices():
    from lean_arch.ops.sparse_linear import plans

    before = len(plans._known)
    given = problem("linear", ("entries", "blocks"))
    both = torch.stack([s.rows for _, s in given.updates[1:]] + [s.cols for _, s in given.updates[1:]])
    given.updates[1] = (given.updates[1][0], type(given.updates[1][1])(*both, (2, 3)))  # views
    given.ours().sum().backward()
    assert len(plans._known) > before
    given.updates[1] = (given.updates[1][0], type(given.updates[1][1])(*both, (2, 3)))  # new ones of the same
    known = len(plans._known)
    given.ours().sum().backward()
    assert len(plans._known) == known
    del given, both
    assert len(plans._known) == before


def test_second_derivative_is_refused():
    given = problem("linear", ("entries",))
    (grad,) = torch.autograd.grad(given.ours().sum(), given.updates[0][0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


def test_forward_mode_is_refused():
    given = problem("linear", ("rows",))
    with pytest.raises(RuntimeError, match="sparse_linear has neither forward-mode"):
        torch.func.vmap(lambda x: sparse_linear(x, given.weight, None, []))(given.x.detach())


def test_gradcheck():
    given = problem("conv2d", KINDS, 2, 1, dtype=torch.float64, x=(1, 3, 4, 3), weight=(2, 3, 3, 2))
    values = [v for v, _ in given.updates]

    def run(x, bias, *values):
        updates = [(v, s) for v, (_, s) in zip(values, given.updates)]
        return sparse_conv2d(x, given.weight, bias, updates, 2, 1)

    torch.autograd.gradcheck(run, (given.x, given.bias, *values))


@pytest.mark.parametrize("layer", ["linear", pytest.param("conv2d", marks=pytest.mark.slow), "embedding"])
def test_compiles_whole(layer):
    given = problem(layer, ("columns", "entries", "blocks"))

    def step(x, bias, *values):
        given.updates = [(v * 2, s) for v, (_, s) in zip(values, given.updates)]
        given.x, given.bias = (x * 2 if x.is_floating_point() else x), bias
        return given.ours().tanh()

    inputs = given.x, given.bias, *(v for v, _ in given.updates)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    for got, want in zip(*(torch.autograd.grad(f(*inputs).square().sum(), leaves) for f in (compiled, step))):
        assert error(got, want.double()) < 1e-6


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("layer", ["linear", "conv2d", "embedding"])
def test_without_data(layer, kind):
    """Shapes and dtypes of results and gradients."""
    given = problem(layer, KINDS)
    out = given.ours()
    grads = torch.autograd.grad(out, given.trained, torch.ones_like(out))
    wanted = [(t.shape, t.dtype) for t in (out, *grads)]
    mode = FakeTensorMode() if kind == "fake" else contextlib.nullcontext()
    move = mode.from_tensor if kind == "fake" else lambda t: t.to("meta")
    empty = given.map(move)
    empty.x = empty.x if empty.x.is_floating_point() else move(given.x)  # ids
    empty.updates = [(v, _moved(s, move)) for (v, _), (_, s) in zip(empty.updates, given.updates)]
    with mode:
        out = empty.ours()
        grads = torch.autograd.grad(out, empty.trained, torch.ones_like(out))
    assert [(t.shape, t.dtype) for t in (out, *grads)] == wanted


def _moved(structure, move):
    fields = [move(f) if isinstance(f, torch.Tensor) else f for f in vars(structure).values()]
    return type(structure)(*fields)


def test_flops_of_the_sparse_products_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    given = problem("linear", ("entries",), x=(7, 40), weight=(30, 40))
    with FlopCounterMode(display=False) as counter:
        given.ours().sum().backward()
    products = 2 * 7 * 30 * 40
    assert counter.get_total_flops() == 2 * products + 3 * 2 * 7 * len(given.updates[0][0])


def test_to_moves_indices():
    for kind in KINDS:
        moved = structure_of(kind, (8, 9), torch.Generator().manual_seed(0)).to("meta")
        moved.check((8, 9))
        assert moved.positions((8, 9)).is_meta


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_all_of_a_weight_is_the_dense_layer(kind):
    x, weight = torch.randn(6, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    values = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    structure = Columns(torch.arange(5)) if kind == "columns" else Rows(torch.arange(4))
    out = sparse_linear(x, weight, None, [(values, structure)])
    torch.testing.assert_close(out, F.linear(x, weight + values))
    (grad,) = torch.autograd.grad(out.square().sum(), values)
    torch.testing.assert_close(grad, 2 * out.t() @ x)


def test_blocks_of_every_size():
    for size in itertools.product((1, 2, 5, 10), (1, 4, 13)):
        compare(problem("linear", ("blocks",), dtype=torch.float64, size=size), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "float8", "nf4"])
def test_quantised_weights(kind, dtype):
    """The product is the quantised tensor's own; gradients are those of what it stands for."""
    quantization = pytest.importorskip("torchao.quantization")
    given = problem("linear", KINDS, x=(4, 64), weight=(48, 64), dtype=dtype, size=(8, 16))
    layer = torch.nn.Linear(64, 48, bias=False, dtype=dtype)
    layer.weight = torch.nn.Parameter(given.weight, requires_grad=False)
    if kind == "nf4":
        nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        given.weight = nf4.to_nf4(given.weight, 32, 1)
    else:
        name = {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}[kind]
        quantization.quantize_(layer, getattr(quantization, name)())
        given.weight = layer.weight
    plain = dataclasses.replace(given, weight=reference.plain(given.weight))
    assert type(plain.weight) is torch.Tensor
    upstream = torch.randn(4, 48).to(dtype)
    results = []
    for each in (given, plain.map(torch.Tensor.double)):
        out = each.ours()
        results.append((out, *torch.autograd.grad(out, each.trained, upstream.to(out.dtype))))
    for got, want in zip(*results):
        assert error(got, want) < TOLERANCE[dtype]
    with torch.autocast("cpu", torch.bfloat16):
        out = given.ours()
    assert out.dtype == torch.bfloat16
    assert error(out, results[1][0]) < 1e-2
