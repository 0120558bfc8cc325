"""Regrowing moves a sparse adapter to the weights that pull most, and takes values and optimizer state along."""

import pytest
import torch
from torch import nn

from lean_arch import adapters
from lean_arch.adapters.layers import matrix

STRUCTURES = ["column", "row", "block", "unstructured"]


def setting(structure, make=lambda: nn.Linear(24, 32), density=0.25):
    torch.manual_seed(0)
    model = nn.Sequential(make())
    x = torch.randn(5, 24) if isinstance(model[0], nn.Linear) else torch.randn(2, model[0].in_channels, 6, 6)
    adapters.attach(model, "sparse", name="task", structure=structure, density=density)
    optimizer = torch.optim.AdamW(adapters.trainable_parameters(model), 0.1, weight_decay=0)

    def loss():
        return (model(x) - 1).square().sum()

    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return model, loss, optimizer


def dense(model, tensor):
    """A tensor of the values' shape, laid into the whole weight."""
    layer = model[0]
    part, weight = layer.adapters["task"], matrix(layer)
    places = part.structure.positions(weight.shape, getattr(layer, "groups", 1)).flatten()
    return torch.zeros(weight.numel()).index_put_((places,), tensor.detach().flatten())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(24, 32), lambda: nn.Conv2d(24, 32, 3), lambda: nn.Conv2d(8, 16, 3, groups=8)]
)
def test_values_and_state_move_along(structure, make):
    if structure == "block" and make().weight.shape[1] == 1:
        pytest.skip("blocks do not go with groups")
    model, loss, optimizer = setting(structure, make)
    part = model[0].adapters["task"]
    parameter, before, index = part.values, dense(model, part.values), part.index.clone()
    momentum = dense(model, optimizer.state[parameter]["exp_avg"])
    moved = adapters.regrow(model, "task", loss, 0.3, optimizer)
    assert part.values is parameter
    assert moved >= 1
    assert not torch.equal(part.index, index)
    after, state = dense(model, part.values), dense(model, optimizer.state[parameter]["exp_avg"])
    assert torch.equal(after[after != 0], before[after != 0])
    assert torch.equal(state[state != 0], momentum[state != 0])
    assert (after != 0).sum() < (before != 0).sum()
    loss().backward()
    optimizer.step()
    assert (part.values != 0).all()


def test_what_is_dropped_and_grown():
    model, _, _ = setting("unstructured", density=0.1)
    layer = model[0]
    part = layer.adapters["task"]
    size = part.values.detach().abs()
    effective = (matrix(layer) + dense(model, part.values).view_as(layer.weight)).requires_grad_()
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))

    def other_loss():
        return (model(x) - 1).square().sum()

    (nn.functional.linear(x, effective, layer.bias) - 1).square().sum().backward()
    pull = effective.grad.abs().flatten()
    pull[part.index] = -1
    count = round(0.2 * len(size))
    wanted = set(pull.topk(count).indices.tolist()) | set(part.index[size.topk(len(size) - count).indices].tolist())
    assert adapters.regrow(model, "task", other_loss, 0.2) == count
    assert set(part.index.tolist()) == wanted
    assert part.index.diff().min() > 0
    assert layer.weight.grad is None
    assert not layer.weight.requires_grad


def test_a_layer_that_is_trained_everywhere_has_nowhere_to_go():
    model, loss, _ = setting("column", density=1.0)
    assert adapters.regrow(model, "task", loss, 0.5) == 0


def test_faults():
    model, loss, _ = setting("2:4")
    with pytest.raises(ValueError, match="'task' is an adapter that cannot regrow"):
        adapters.regrow(model, "task", loss)
    model, loss, _ = setting("column")
    with pytest.raises(ValueError, match="fraction 0 must be a share"):
        adapters.regrow(model, "task", loss, 0)
    adapters.merge(model, "task")
    with pytest.raises(ValueError, match="is merged"):
        adapters.regrow(model, "task", loss)
