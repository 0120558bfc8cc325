"""ReversibleSequence amid PyTorch: autograd, hooks, copies, compilers, threads, processes; and what it refuses."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from lean_arch.blocks import ReversibleSequence
from tests.blocks.stacks import assert_same_bits, feed_forward, run, stack


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


def test_second_derivatives_are_refused():
    model = stack(p=0.0)
    x = torch.randn(2, 3, 8, requires_grad=True)
    y1, y2 = model((x, x))
    (grad,) = torch.autograd.grad((y1 * y2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
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
    with pytest.raises(ValueError, match=r"chunks must be a whole number, 1 or more, got 1\.5"):
        ReversibleSequence([], chunks=1.5)
    with pytest.raises(TypeError, match="pairs must be of two modules"):
        ReversibleSequence([(nn.Identity(), lambda x: x)])
    with pytest.raises(ValueError, match="pair of tensors"):
        stack()(torch.randn(2, 8))
    with pytest.raises(TypeError, match="LSTM must return a tensor"):
        ReversibleSequence([(nn.LSTM(8, 8), nn.Identity())])((torch.randn(2, 8),) * 2)
    with pytest.raises(ValueError, match="one shape and dtype"):
        stack()((torch.randn(2, 8), torch.randn(3, 8)))
    with pytest.raises(ValueError, match="one shape and dtype"):
        stack()((torch.ones(2, 8, dtype=torch.long),) * 2)
    with pytest.raises(ValueError, match="Linear must keep the shape"):
        ReversibleSequence([(nn.Linear(8, 4), nn.Identity())])((torch.randn(2, 8),) * 2)


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
