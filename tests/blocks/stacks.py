"""Small reversible stacks with dropout, and one run of them."""

import torch
from torch import nn

from lean_arch.blocks import ReversibleSequence


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
