"""One step of a lean block and of its textbook twin, which runs nn.Modules of torch alone."""

import contextlib
import copy
import types

import pytest
import torch

from lean_arch.blocks import convnext, layer_norm2d, norm_act, separable


@contextlib.contextmanager
def textbook():
    """Inside, no block runs lean."""
    with pytest.MonkeyPatch.context() as patch:
        for room in (norm_act, separable, convnext, layer_norm2d):
            patch.setattr(room, "runs_lean", lambda x, *modules: False)
        yield


def maps(*shape, layout=torch.contiguous_format, seed=1):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.3
    return x.to(memory_format=layout).requires_grad_()


def scattered(block):
    """Parameters and running statistics away from where they start."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in block.parameters():
            p.add_(torch.randn_like(p) * 0.3)
        for b in block.buffers():
            if b.is_floating_point():
                b.add_(torch.rand_like(b))
    return block


def step(block, x, seed=2):
    """Result, gradients and buffers after one forward and backward pass."""
    block.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(seed)
    y = block(x)
    y.backward(torch.randn(y.shape, dtype=y.dtype))
    named = {"y": y.detach(), "grad of x": x.grad, "random stream": torch.rand(())}
    named |= {f"grad of {n}": p.grad for n, p in block.named_parameters()}
    return named | {n: b.clone() for n, b in block.named_buffers()}


def relative_error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def assert_alike(got, want, near=(), tolerance=2e-6, floor=0.0):
    """To the bit, save for names that contain one of `near`; floor: a norm below which all is rounding."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        g = got[name]
        assert (g is None) == (w is None), name
        if w is None:
            continue
        assert (g.shape, g.dtype) == (w.shape, w.dtype), name
        if any(part in name for part in near):
            assert (g.double() - w.double()).norm() <= tolerance * (w.double().norm() + floor), name
        else:
            assert torch.equal(g, w), f"{name}: {relative_error(g, w):.1e}"


def raise_forward(module):
    """Gives a module, and copies of it, a forward of their own: half more than before."""
    module.forward = types.MethodType(lambda self, x: type(self).forward(self, x) + 0.5, module)


def compare(block, x, **how):
    twin = copy.deepcopy(block)
    with textbook():
        want = step(twin, x)
    assert_alike(step(block, x), want, **how)
