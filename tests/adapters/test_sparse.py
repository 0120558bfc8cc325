"""Sparse adapters: which weights are chosen, that gradients are those of the dense layer there, and what is kept."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lean_arch import adapters
from lean_arch.adapters.layers import matrix


def part_of(layer):
    return layer.adapters["task"]


def positions(layer):
    part = part_of(layer)
    return part.structure.positions(matrix(layer).shape, getattr(layer, "groups", 1)).flatten()


def scores(weight, structure):
    if structure == "column":
        return weight.flatten(2).sum((0, 2)) if weight.dim() > 2 else weight.sum(0)
    return weight.flatten(1).sum(1)


@pytest.mark.parametrize("structure", ["column", "row", "block", "2:5", "n:m", "unstructured"])
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([0.02, 0.1, 0.5, 1.0]), st.integers(0, 3))
def test_any_shape(structure, outputs, inputs, density, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, outputs))
    weight = model[0].weight.detach().clone()
    adapters.attach(model, "sparse", name="task", structure=structure, density=density, select="random", seed=seed)
    chosen = positions(model[0])
    assert len(chosen.unique()) == len(chosen) == part_of(model[0]).values.numel() >= 1
    x = torch.randn(3, inputs, dtype=torch.float64)
    model.double()
    model(x).square().sum().backward()
    dense = weight.double().requires_grad_()
    F.linear(x, dense, model[0].bias).square().sum().backward()
    torch.testing.assert_close(
        part_of(model[0]).values.grad.flatten(), dense.grad.flatten()[chosen], rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("structure", ["column", "row"])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(20, 30), lambda: nn.Conv2d(20, 30, 3), lambda: nn.Embedding(30, 20)]
)
def test_magnitude_chooses_the_largest(structure, make):
    torch.manual_seed(0)
    model = nn.Sequential(make())
    weight = model[0].weight.detach()
    target = "embeddings" if isinstance(model[0], nn.Embedding) else None
    adapters.attach(model, "sparse", name="task", structure=structure, density=0.2, target=target)
    best = scores(weight.abs(), structure).topk(round(0.2 * (20 if structure == "column" else 30))).indices
    assert part_of(model[0]).index.tolist() == sorted(best.tolist())


def test_activation_is_the_weight_s_size_times_its_input_s():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(10, 8), nn.Conv1d(3, 5, 2)), torch.randn(4, 3, 10)
    x[..., 7] *= 100
    adapters.attach(model, "sparse", name="task", structure="unstructured", density=0.1, select="activation", sample=x)
    want = (model[0].weight.abs() * x.square().sum((0, 1)).sqrt()).flatten().topk(8).indices
    assert positions(model[0]).tolist() == sorted(want.tolist())
    assert model.training


def test_gradient_is_streamed_and_leaves_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(2, 64)

    def loss():
        return model(x).square().sum()

    loss().backward()
    want = [layer.weight.grad.abs().flatten().topk(41).indices.sort().values for layer in model]
    kept = [p.grad.clone() for p in model.parameters()]
    adapters.attach(model, "sparse", name="task", structure="unstructured", select="gradient", loss=loss)
    for layer, index in zip(model, want):
        assert torch.equal(positions(layer), index)
        assert not layer.weight.requires_grad
    base = [p for name, p in model.named_parameters() if "adapters" not in name]
    assert all(torch.equal(p.grad, before) for p, before in zip(base, kept))


def test_a_loss_without_a_layer_is_refused():
    model, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(2, 4)
    with pytest.raises(ValueError, match="loss does not depend on layer '1'"):
        adapters.attach(model, "sparse", select="gradient", loss=lambda: model[0](x).sum())


def test_random_depends_on_the_seed_alone():
    chosen = []
    for seed in (1, 1, 2):
        model = nn.Sequential(nn.Linear(50, 50))
        torch.rand(seed)
        adapters.attach(model, "sparse", name="task", select="random", seed=seed, density=0.2)
        chosen.append(part_of(model[0]).index.tolist())
    assert chosen[0] == chosen[1] != chosen[2]


def test_norms_and_embeddings():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    ids = torch.randint(20, (4, 5))
    adapters.attach(model, "sparse", name="task", target="0|1", density=0.25)
    plain = model(ids)
    with torch.no_grad():
        for p in adapters.trainable_parameters(model):
            p += torch.randn_like(p)
    out = model(ids)
    assert not torch.allclose(out, plain)
    out.sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in adapters.trainable_parameters(model))
    adapters.merge(model, "task")
    torch.testing.assert_close(model(ids), out)


def test_a_layer_under_training_whole_is_refused_at_the_forward_pass_by_name():
    model = nn.Sequential(nn.Linear(4, 4))
    adapters.attach(model, "sparse", name="task")
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="weight requires a gradient"):
        model(torch.randn(2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_autocast(dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), torch.randn(4, 32)
    adapters.attach(model, "sparse", name="task", density=0.2)
    with torch.autocast("cpu", dtype):
        model(x).float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in adapters.trainable_parameters(model))
    model.to(dtype)
    model(x.to(dtype)).float().square().sum().backward()


def test_gradients_see_the_adapters_that_are_there():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)), torch.randn(4, 12)
    adapters.attach(model, "lora", name="first")
    with torch.no_grad():
        for parameter in adapters.trainable_parameters(model):
            parameter += torch.randn_like(parameter)
    before = [layer.weight.clone() for layer in model]

    def loss():
        return model(x).square().sum()

    options = {"structure": "unstructured", "density": 0.1, "select": "gradient", "loss": loss}
    adapters.attach(model, "sparse", name="task", **options)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(model, before))
    adapters.merge(model, "first")
    merged = [layer.weight.detach().requires_grad_() for layer in model]
    y = F.linear(F.linear(x, merged[0], model[0].bias), merged[1], model[1].bias)
    y.square().sum().backward()
    for layer, weight in zip(model, merged):
        assert positions(layer).tolist() == sorted(weight.grad.abs().flatten().topk(14).indices.tolist())
