"""measure() against the allocator's own count and against a breakdown worked out by hand."""

import functools

import pytest
import torch
from torch import nn

from lean_arch.memory import measure
from lean_arch.memory.holdings import used_by
from tests.ruler import peak_bytes

MIB = 2**20


@pytest.fixture
def trained():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.BatchNorm1d(512), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 256)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, model, optimizer, batch


def held_bytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def test_peak_is_what_was_held_plus_the_allocators_rise(trained):
    step, model, optimizer, batch = trained
    step()
    state = [t for s in optimizer.state.values() for t in s.values()]
    held = held_bytes(*model.parameters(), *model.buffers(), *state, batch)
    report = measure(step, model, optimizer, batch)
    assert report.peak_bytes == held + peak_bytes(step)
    assert sum(report.by_category.values()) == report.peak_bytes
    assert report.by_category["weights"] == held_bytes(*model.parameters(), *model.buffers())
    assert report.by_category["optimizer"] == held_bytes(*state)


def test_what_a_step_uses_is_found_through_its_closure(trained):
    step, *held = trained
    step()
    assert measure(step) == measure(step, *held)
    assert {id(thing) for thing in used_by(functools.partial(step))} == {id(thing) for thing in held}


def test_state_made_in_the_first_step_is_the_optimizers(trained):
    step, model, _, _ = trained
    first = measure(step)
    assert first.by_category["optimizer"] > held_bytes(*model.parameters())


def test_breakdown_at_the_moment_of_the_peak():
    weight = nn.Parameter(torch.randn(MIB // 4))

    class Hold(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = torch.empty(3 * MIB, dtype=torch.uint8)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return torch.ones(MIB // 4)

    def step():
        Hold.apply(weight).backward()
        waste = torch.empty(8 * MIB, dtype=torch.uint8)
        del waste

    weights, gradients, optimizer, activations, other = measure(step, weight).by_category.values()
    assert (weights, gradients, optimizer) == (MIB, MIB, 0)
    assert activations < 4 * MIB
    assert other == 8 * MIB


def test_gradients_dropped_at_the_start_are_not_counted_twice(trained):
    _, model, _, batch = trained

    def step():
        model.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()

    fresh = measure(step)
    assert model[0].weight.grad is not None
    assert measure(step).peak_bytes == pytest.approx(fresh.peak_bytes, rel=1e-3)


def test_held_of_another_kind_is_refused(trained):
    with pytest.raises(TypeError, match="held must be modules, optimizers or tensors, not str"):
        measure(trained[0], "model")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_agrees_with_cudas_own_peak(trained):
    _, model, _, batch = trained
    model, batch = model.cuda(), batch.cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    assert measure(step).peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.02)
