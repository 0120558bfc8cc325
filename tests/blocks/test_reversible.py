"""ReversibleSequence: the numbers of a stored run, bit for bit, and none of its memory."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lean_arch.blocks import ReversibleSequence
from tests.ruler import peak_bytes


class DropPath(nn.Module):
    def forward(self, x):
        keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1)) < 0.7
        return x * keep / 0.7 if self.training else x


def feed_forward(dim=8, hidden=16, p=0.0):
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(p), nn.Linear(hidden, dim))


def stack(depth=3, exact=True, chunks=1, dim=8, p=0.3):
    torch.manual_seed(0)
    return ReversibleSequence(
        [(feed_forward(dim, p=p), nn.Sequential(feed_forward(dim, p=p), DropPath())) for _ in range(depth)],
        exact=exact,
        chunks=chunks,
    )


def run(model, x1, x2, reversible, autocast=None, seed=1):
    """Outputs, input gradients and parameter gradients of one forward and backward."""
    model.reversible = reversible
    model.zero_grad(set_to_none=True)
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in (x1, x2)]
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        y1, y2 = model(tuple(inputs))
    after = torch.rand(())
    if y1.requires_grad or y2.requires_grad:
        (y1.square().mean() + (y2 * torch.linspace(-1, 1, y2.shape[-1])).sum()).backward()
    named = {f"y{i}": y.detach() for i, y in enumerate((y1, y2))} | {"random stream after the run": after}
    named |= {f"grad of input {i}": x.grad for i, x in enumerate(inputs)}
    return named | {f"grad of {n}": p.grad for n, p in model.named_parameters()}


def assert_same_bits(got, want):
    for name in want:
        if want[name] is None:
            assert got[name] is None, name
        else:
            assert got[name] is not None, name
            assert torch.equal(got[name], want[name]), name


def assert_reversible_equals_stored(model, x1, x2, autocast=None):
    assert_same_bits(run(model, x1, x2, True, autocast), run(model, x1, x2, False, autocast))


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


def test_autograd_grad_reaches_parameters_without_touching_grad():
    model = stack()
    x = torch.randn(2, 3, 8, requires_grad=True)
    want = run(model, x, x, False)
    model.zero_grad()
    model.reversible = True
    torch.manual_seed(1)
    y1, y2 = model((x, x.clone()))
    names, params = zip(*model.named_parameters())
    loss = y1.square().mean() + (y2 * torch.linspace(-1, 1, 8)).sum()
    grads = torch.autograd.grad(loss, params, retain_graph=True)
    assert all(p.grad is None for p in params)
    assert_same_bits(
        {f"grad of {n}": g for n, g in zip(names, grads)}, {f"grad of {n}": want[f"grad of {n}"] for n in names}
    )
    again = torch.autograd.grad(loss, params)  # a retained graph runs twice
    assert all(torch.equal(a, b) for a, b in zip(grads, again))


def test_only_one_output_used_and_part_of_the_parameters_asked_for():
    model = stack()
    x = torch.randn(2, 3, 8, requires_grad=True)
    for output in (0, 1):
        grads = []
        for reversible in (True, False):
            model.reversible = reversible
            torch.manual_seed(2)
            loss = model((x, x.clone()))[output].square().sum()
            last = [*model[2].f.parameters(), *model[1].g.parameters()]
            grads.append(torch.autograd.grad(loss, last, allow_unused=True))
        for a, b in zip(*grads):
            assert (a is None or not a.any()) if b is None else torch.equal(a, b)


def test_hooks_see_every_gradient_once():
    model = stack()
    seen = {}
    x = torch.randn(2, 3, 8, requires_grad=True)
    plain = run(model, x, x, True)
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.__setitem__(name, seen.get(name, 0) + 1) or g * 2)
    doubled = run(model, x, x, True)
    assert seen == {name: 1 for name, _ in model.named_parameters()}
    for name, _ in model.named_parameters():
        assert torch.equal(doubled[f"grad of {name}"], 2 * plain[f"grad of {name}"]), name


def test_shared_modules_add_up():
    torch.manual_seed(0)
    f, g = feed_forward(), feed_forward()
    x = torch.randn(2, 3, 8, requires_grad=True)
    model = ReversibleSequence([(f, g), (f, g), (g, f)])
    lean, stored = run(model, x, x, True), run(model, x, x, False)
    for name in stored:
        torch.testing.assert_close(lean[name], stored[name])


def test_second_derivatives_are_refused():
    model = stack(p=0.0)
    x = torch.randn(2, 3, 8, requires_grad=True)
    y1, y2 = model((x, x))
    (grad,) = torch.autograd.grad((y1 * y2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_captured_tensor_that_needs_a_gradient_is_refused():
    class Shifted(nn.Module):
        def forward(self, x):
            return x * shift

    shift = torch.ones(8, requires_grad=True)
    model = ReversibleSequence([(Shifted(), feed_forward())])
    x = torch.randn(2, 3, 8, requires_grad=True)
    y1, _ = model((x, x))
    with pytest.raises(RuntimeError, match=r"Shifted uses a tensor of shape \(8,\)"):
        y1.sum().backward()


def test_weights_changed_between_forward_and_backward_are_refused():
    model = stack()
    x = torch.randn(2, 3, 8, requires_grad=True)
    loss = model((x, x))[0].sum()
    with torch.no_grad():
        model[0].f[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_grad_and_inference_give_the_same_values():
    model = stack().eval()
    x = torch.randn(2, 3, 8)
    want = model((x, x))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert all(torch.equal(a, b) for a, b in zip(model((x, x)), want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_modules(dtype):
    model = stack(5).to(dtype)
    x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    got = run(model, x, x, True)
    assert got["y0"].dtype == dtype
    assert_same_bits(got, run(model, x, x, False))


def test_copies_slices_and_state_dict():
    model = stack()
    assert set(model.state_dict()) == {n for n, _ in model.named_parameters()}
    assert "0.f.1.weight" in model.state_dict()
    x = torch.randn(2, 3, 8, requires_grad=True)
    assert_same_bits(run(copy.deepcopy(model), x, x, True), run(model, x, x, True))
    part = model[1:]
    assert isinstance(part, ReversibleSequence)
    assert len(part) == 2
    assert part[0] is model[1]
    torch.manual_seed(5)
    whole = model((x, x))
    torch.manual_seed(5)
    split = model[1:](model[:1]((x, x)))
    assert torch.equal(whole[0], split[0])


def test_compile_keeps_the_bits():
    model = stack()
    x = torch.randn(2, 3, 8, requires_grad=True)
    want = run(model, x, x, True)
    torch.manual_seed(1)
    y1, y2 = torch.compile(model, backend="eager")((x, x.clone()))
    assert torch.equal(y1, want["y0"])
    model.zero_grad()
    (y1.square().mean() + (y2 * torch.linspace(-1, 1, 8)).sum()).backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, want[f"grad of {name}"]), name


def test_export_and_script_give_the_same_values():
    model = stack(p=0.0).eval()
    x = torch.randn(2, 3, 8)
    want = model((x, x))
    exported = torch.export.export(model, ((x, x),)).module()
    assert all(torch.equal(a, b) for a, b in zip(exported((x, x)), want))
    for exact in (True, False):
        model = ReversibleSequence([(feed_forward(), feed_forward())], exact=exact).eval()
        assert all(torch.equal(a, b) for a, b in zip(torch.jit.script(model)((x, x)), model((x, x))))


def test_threads_may_run_the_same_stack():
    model = stack(p=0.0).eval()
    x = torch.randn(2, 3, 8)
    params = list(model.parameters())

    def gradients(_=None):
        y1, y2 = model((x, x))
        return torch.autograd.grad((y1 * y2).sum(), params)

    want = gradients()
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(gradients, range(20)):
            assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert all(a is b for a, b in zip(model.parameters(), params))


def test_changing_the_input_in_place_is_refused():
    model = ReversibleSequence([(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), nn.Identity())])
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="Sequential changes its input in place"):
        model((x, x))
    with torch.no_grad(), pytest.raises(RuntimeError, match="Sequential changes its input in place"):
        model((x, x))


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


def test_a_hook_that_replaces_the_streams_is_refused():
    model = stack()
    x = torch.randn(2, 3, 8, requires_grad=True)
    handle = model[0].register_forward_hook(lambda module, inputs, outputs: (outputs[0] * 2, outputs[1]))
    with pytest.raises(RuntimeError, match="a hook replaced the streams"):
        model((x, x))
    handle.remove()
    model[0].register_forward_hook(lambda module, inputs, outputs: outputs)
    model((x, x))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="chunks"):
        ReversibleSequence([], chunks=0)
    with pytest.raises(ValueError, match="least_chunk"):
        ReversibleSequence([], least_chunk=0)
    with pytest.raises(ValueError, match="one shape and dtype"):
        stack()((torch.randn(2, 8), torch.randn(3, 8)))
    with pytest.raises(ValueError, match="one shape and dtype"):
        stack()((torch.ones(2, 8, dtype=torch.long),) * 2)
    with pytest.raises(ValueError, match="Linear must keep the shape"):
        ReversibleSequence([(nn.Linear(8, 4), nn.Identity())])((torch.randn(2, 8),) * 2)


def test_empty_batch_and_empty_stack():
    x = torch.randn(0, 3, 8, requires_grad=True)
    assert_reversible_equals_stored(stack(), x, x)
    y = torch.randn(2, 8)
    assert all((a - y).abs().max() <= 2**-19 for a in ReversibleSequence()((y, y)))


def _ddp(rank, port, path):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = stack(p=0.0)
    parallel = nn.parallel.DistributedDataParallel(model)
    x = torch.arange(4 * 3 * 8).reshape(4, 3, 8).sin()[rank * 2 : rank * 2 + 2]
    model.eval()
    for _ in range(2):
        model.zero_grad()
        y1, y2 = parallel((x, x))
        (y1.square().mean() + y2.mean()).backward()
    if rank == 0:
        torch.save({n: p.grad for n, p in model.named_parameters()}, path)
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel(tmp_path):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_ddp, (port, tmp_path / "grads.pt"), nprocs=2)
    got = torch.load(tmp_path / "grads.pt", weights_only=True)
    model = stack(p=0.0).eval()
    x = torch.arange(4 * 3 * 8).reshape(4, 3, 8).sin()
    y1, y2 = model((x, x))
    (y1.square().mean() + y2.mean()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-5, atol=1e-7, msg=name)
