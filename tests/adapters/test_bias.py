"""The bias adapter trains biases and norms, and what it keeps for the backward pass is little."""

import pytest
import torch
from torch import nn

from lean_arch import adapters


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.MultiheadAttention(8, 2))


def test_which_parameters_are_trained():
    model = network()
    adapters.attach(model, "bias", name="task")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"0.bias", "1.weight", "1.bias", "3.in_proj_bias", "3.out_proj.bias"}
    adapters.detach(model, "task")
    adapters.attach(model, "bias", name="task", norms=False, target="0|1")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"0.bias", "1.bias"}


def test_merging_has_nothing_to_do_and_detaching_gives_back():
    model = network()[:3]
    before, x = [p.clone() for p in model.parameters()], torch.randn(2, 8)
    adapters.attach(model, "bias", name="task")
    with torch.no_grad():
        for parameter in adapters.trainable_parameters(model):
            parameter += 1
    out = model(x)
    adapters.merge(model, "task")
    assert torch.equal(model(x), out)
    adapters.unmerge(model, "task")
    adapters.detach(model, "task")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))


def test_faults():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with pytest.raises(ValueError, match=r"target '\.\*' matches no layer that has a bias or is a norm"):
        adapters.attach(model, "bias")
    with pytest.raises(ValueError, match="target 'mlp' names weights"):
        adapters.attach(network(), "bias", target="mlp")
    assert all(p.requires_grad for p in model.parameters())
