"""Merging gives the adapter's outputs at the base's cost, and unmerging the base to the bit."""

import pytest
import torch
from torch import nn

from lean_arch import adapters

METHODS = [
    ("sparse", {"structure": "column", "density": 0.2}),
    ("sparse", {"structure": "row", "density": 0.2}),
    ("sparse", {"structure": "block", "density": 0.2, "block_size": (2, 2)}),
    ("sparse", {"structure": "2:4"}),
    ("sparse", {"structure": "unstructured", "density": 0.2}),
    ("sparse", {"structure": "unstructured", "density": 0.2, "rank": 2}),
    ("lora", {"rank": 3}),
]


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"),
        nn.GELU(),
        nn.Conv2d(8, 8, 3, stride=2, dilation=2, padding=2),
        nn.Flatten(2),
        nn.Conv1d(8, 12, 3, padding="same"),
        nn.Linear(16, 12),
        nn.LayerNorm(12),
        nn.Linear(12, 6, bias=False),
    ).to(dtype)


@torch.no_grad()
def disturb(model, name=None):
    generator = torch.Generator().manual_seed(3)
    for parameter in adapters.trainable_parameters(model, name):
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize(("method", "options"), METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(method, options, dtype):
    model = network(dtype)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 4, 8, 8, dtype=dtype)
    adapters.attach(model, method, name="task", **options)
    disturb(model)
    out = model(x)
    adapters.merge(model, "task")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    assert (model(x) - out).float().norm() <= tolerance * out.float().norm()
    assert any(not torch.equal(model.state_dict()[name], tensor) for name, tensor in base.items())
    with pytest.raises(ValueError, match="merged already"):
        adapters.merge(model, "task")
    adapters.unmerge(model, "task")
    assert torch.equal(model(x), out)
    for name, tensor in base.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="not merged"):
        adapters.unmerge(model, "task")


@pytest.mark.parametrize("first_out", ["first", "second"])
def test_two_merged_come_out_in_any_order(first_out):
    model, x = network(torch.bfloat16), torch.randn(2, 4, 8, 8, dtype=torch.bfloat16)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, method in (("first", "sparse"), ("second", "lora")):
        adapters.attach(model, method, name=name)
        disturb(model, name)
    for name in ("first", "second"):
        adapters.merge(model, name)
    adapters.unmerge(model, first_out)
    left = {"first": "second", "second": "first"}[first_out]
    one = model(x)
    adapters.unmerge(model, left)
    adapters.merge(model, left)
    assert torch.equal(model(x), one)
    adapters.detach(model, left)
    adapters.detach(model, first_out)
    for name, tensor in base.items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_merging_respects_the_factor():
    model, x = network(), torch.randn(2, 4, 8, 8)
    adapters.attach(model, "sparse", name="task")
    disturb(model)
    adapters.activate(model, {"task": 0.5})
    out = model(x)
    adapters.merge(model, "task")
    torch.testing.assert_close(model(x), out)
    with pytest.raises(ValueError, match="merged; unmerge it"):
        adapters.activate(model, "task")


def test_grouped_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, groups=4), nn.Conv2d(16, 16, 3, groups=16))
    x = torch.randn(2, 8, 9, 9)
    for structure in ("column", "row", "unstructured", "1:3"):
        adapters.attach(model, "sparse", name="task", structure=structure, density=0.3)
        disturb(model)
        out = model(x)
        adapters.merge(model, "task")
        torch.testing.assert_close(model(x), out)
        adapters.detach(model, "task")


def test_fused_projections_change_only_the_chosen_thirds():
    torch.manual_seed(0)
    model = nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)})
    before = model["qkv"].weight.clone()
    for method, options in METHODS:
        if options.get("structure") == "2:4" or options.get("block_size"):
            continue
        adapters.attach(model, method, name="task", target="qkv", qkv="qv", **options)
        disturb(model)
        x = torch.randn(3, 8)
        out = model["qkv"](x)
        adapters.merge(model, "task")
        torch.testing.assert_close(model["qkv"](x), out)
        changed = (model["qkv"].weight != before).any(1).view(3, 8).any(1)
        assert changed.tolist() in ([True, False, True], [True, False, False], [False, False, True])
        adapters.detach(model, "task")
