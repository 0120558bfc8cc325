"""ReversibleSequence: the numbers of a stored run, bit for bit, and none of its memory."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lean_arch.blocks import ReversibleSequence
from tests.blocks.stacks import assert_reversible_equals_stored, assert_same_bits, feed_forward, run, stack
from tests.ruler import peak_bytes


@settings(max_examples=25, deadline=None)
@given(
    depth=st.integers(1, 7),
    batch=st.integers(1, 6),
    tokens=st.integers(1, 5),
    dim=st.sampled_from([1, 3, 8]),
    chunks=st.integers(1, 8),
    autocast=st.sampled_from([None, torch.bfloat16]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_gradients_equal_stored_ones_bit_for_bit(depth, batch, tokens, dim, chunks, autocast, dtype):
    model = stack(depth, chunks=chunks, dim=dim).to(dtype)
    x1 = torch.randn(batch, tokens, dim, dtype=dtype, requires_grad=True)
    x2 = torch.randn(batch, tokens, dim, dtype=dtype, requires_grad=True)
    assert_reversible_equals_stored(model, x1, x2, autocast if dtype == torch.float32 else None)


@pytest.mark.parametrize("exact", [True, False])
def test_matches_the_textbook_in_float64(exact):
    model = stack(4, exact=exact, p=0.0).double().eval()
    x1, x2 = (torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    got = run(model, x1, x2, True)
    model.zero_grad()
    inputs = [x.detach().clone().requires_grad_() for x in (x1, x2)]
    y1, y2 = inputs
    for pair in model:
        y1 = y1 + pair.f(y2)
        y2 = y2 + pair.g(y1)
    (y1.square().mean() + (y2 * torch.linspace(-1, 1, 8)).sum()).backward()
    want = {"y0": y1, "y1": y2, "grad of input 0": inputs[0].grad, "grad of input 1": inputs[1].grad}
    want |= {f"grad of {n}": p.grad for n, p in model.named_parameters()}
    for name, value in want.items():
        torch.testing.assert_close(got[name], value.detach(), rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("depth", [12, 48, 96])
def test_streams_return_exactly_at_any_depth_under_autocast(depth):
    x = torch.randn(2, 3, 8, requires_grad=True)
    assert_reversible_equals_stored(stack(depth), x, x, torch.bfloat16)


def test_streams_are_fixed_point_numbers_as_near_as_can_be():
    model = stack(6, p=0.0).eval()
    plain = stack(6, exact=False, p=0.0).eval()
    x = torch.randn(4, 5, 8)
    y, z = model((x, x))[0], plain((x, x))[0]
    assert not torch.equal(y, z)
    assert (y - z).abs().max() < 6 * 2 * 2**-18
    assert torch.equal(y * 2**18, (y * 2**18).round())


def test_a_layer_scale_of_1e_5_is_felt():
    """A coarser grid would round what such a layer adds to nothing."""
    x = torch.randn(4, 5, 8)
    layer = feed_forward()
    nn.init.normal_(layer[-1].weight, std=1e-5)
    nn.init.zeros_(layer[-1].bias)
    model = ReversibleSequence([(layer, nn.Identity())])
    want = layer(x).detach()
    got = model((torch.zeros_like(x), x))[0].detach()
    assert (got - want).norm() < 0.1 * want.norm()


def test_depth_costs_no_memory():
    x = torch.randn(64, 16, 32, requires_grad=True)

    def cost(depth, reversible):
        model = stack(depth, dim=32)
        model.reversible = reversible
        return peak_bytes(lambda: sum(y.sum() for y in model((x, x))).backward())

    lean, stored = ((cost(24, r) - cost(4, r)) / 20 for r in (True, False))
    assert lean < 0.03 * stored  # random states of three dropouts
    assert cost(24, True) < 0.2 * cost(24, False)


def test_chunks_lower_the_cost_of_a_layer():
    x = torch.randn(64, 16, 32, requires_grad=True)

    def cost(chunks, **options):
        layers = [(feed_forward(32, 256), feed_forward(32, 256)) for _ in range(2)]
        model = ReversibleSequence(layers, chunks=chunks, **options)
        return peak_bytes(lambda: sum(y.sum() for y in model((x, x))).backward())

    assert cost(8) < 0.5 * cost(1)
    assert cost(8, least_chunk=x.numel() // 2) > 1.2 * cost(8)  # two parts instead of eight


def test_frozen_stem_frozen_layers_and_inputs_without_gradient():
    x = torch.randn(2, 3, 8)
    assert_reversible_equals_stored(stack(), x, x)  # no input needs a gradient
    some = x.clone().requires_grad_()
    assert_reversible_equals_stored(stack(), some, x)
    assert_reversible_equals_stored(stack(), x, some)
    for frozen in ([0], [2], [0, 1], [0, 1, 2]):
        model = stack()
        for index in frozen:
            model[index].requires_grad_(False)
        assert_reversible_equals_stored(model, x, x)
        assert_reversible_equals_stored(model, some, some)
    model = stack()
    for pair in model:
        pair.f[1].weight.requires_grad_(False)
        pair.g.requires_grad_(False)
    assert_reversible_equals_stored(model, x, some)


def test_batchnorm_is_updated_once():
    def build():
        torch.manual_seed(0)
        conv = lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())  # noqa: E731
        return ReversibleSequence([(conv(), conv()) for _ in range(3)])

    lean, stored = build(), build()
    x = torch.randn(5, 4, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    assert_same_bits(run(lean, x, x, True), run(stored, x, x, False))
    assert all(torch.equal(a, b) for a, b in zip(lean.buffers(), stored.buffers(), strict=True))
    assert lean[0].f[1].num_batches_tracked == 1
    assert all(m.track_running_stats and m.momentum == 0.1 for m in lean.modules() if isinstance(m, nn.BatchNorm2d))
    assert_same_bits(run(lean.eval(), x, x, True), run(stored.eval(), x, x, False))


def test_shared_modules_add_up():
    torch.manual_seed(0)
    f, g = feed_forward(), feed_forward()
    x = torch.randn(2, 3, 8, requires_grad=True)
    model = ReversibleSequence([(f, g), (f, g), (g, f)])
    lean, stored = run(model, x, x, True), run(model, x, x, False)
    for name in stored:
        torch.testing.assert_close(lean[name], stored[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_modules(dtype):
    model = stack(5).to(dtype)
    x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    got = run(model, x, x, True)
    assert got["y0"].dtype == dtype
    assert_same_bits(got, run(model, x, x, False))


def test_out_of_range_is_nan_with_a_warning():
    model = stack().eval()
    x = torch.randn(2, 3, 8, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model((x, x))
    for reversible in (True, False):
        model.reversible = reversible
        with pytest.warns(UserWarning, match="a reversible stream reached .*, beyond 4096, so its results are NaN"):
            y1, y2 = model((x * 1e5, x))
        assert y1.isnan().all()
        assert y2.isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad):
    """Integers know no NaN, so it has to be carried beside them."""
    for place in ("input", "weight"):
        model = stack().eval()
        x = torch.randn(2, 3, 8, requires_grad=True)
        with torch.no_grad():
            (x if place == "input" else model[1].f[1].weight).view(-1)[3] = bad
        assert not model((x, x))[0].isfinite().any()


def test_empty_batch_and_empty_stack():
    x = torch.randn(0, 3, 8, requires_grad=True)
    assert_reversible_equals_stored(stack(), x, x)
    y = torch.randn(2, 8)
    assert all((a - y).abs().max() <= 2**-19 for a in ReversibleSequence()((y, y)))
