"""Attaching and detaching: the base freezes and comes back, adapters live beside each other, faults change nothing."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from lean_arch import adapters
from lean_arch.adapters.method import attached


def vit(**options):
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10, **options)


def images(batch=2):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def disturb(model, name=None, by=0.1):
    generator = torch.Generator().manual_seed(2)
    for parameter in adapters.trainable_parameters(model, name):
        parameter += by * torch.randn(parameter.shape, generator=generator)


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model, state):
    now = model.state_dict()
    assert list(now) == list(state)
    for name, tensor in state.items():
        assert torch.equal(now[name], tensor), name


@pytest.mark.parametrize("method", ["sparse", "lora", "bias"])
def test_outputs_are_the_base_s_at_first_and_the_base_comes_back(method):
    model = vit().eval()
    model.patch_embed.proj.bias.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    state, classes = state_of(model), {name: type(m) for name, m in model.named_modules()}
    plain = model(images())
    adapters.attach(model, method, name="task")
    assert torch.equal(model(images()), plain)
    disturb(model)
    assert not torch.allclose(model(images()), plain)
    model.train()
    adapters.detach(model, "task")
    assert_same(model, state)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert torch.equal(model.eval()(images()), plain)
    assert attached(model) is None


def test_only_the_adapter_and_what_is_also_trained_gets_gradients():
    model = vit()
    adapters.attach(model, "sparse", name="task", also_train="head")
    model(images()).square().sum().backward()
    with_gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradients == {n for n, _ in model.named_parameters() if ".adapters." in n} | {
        "head.weight",
        "head.bias",
    }
    assert set(adapters.trainable_parameters(model)) == {p for p in model.parameters() if p.grad is not None}
    assert not hasattr(model.head, "adapters")


def test_two_adapters_add_up_and_can_be_weighed_and_switched():
    model = vit().eval()
    x = images()
    base = model(x)
    adapters.attach(model, "sparse", name="first", target="attention")
    disturb(model, "first")
    first = model(x)
    adapters.attach(model, "lora", name="second", target="mlp")
    assert torch.equal(model(x), first)
    disturb(model, "second")
    both = model(x)
    adapters.activate(model, "first")
    assert torch.equal(model(x), first)
    adapters.activate(model, ())
    assert torch.equal(model(x), base)
    adapters.activate(model, {"first": 1.0, "second": 1.0})
    assert torch.equal(model(x), both)
    adapters.activate(model, {"first": 0.5})
    assert not torch.allclose(model(x), first)
    adapters.detach(model, "first")
    adapters.activate(model, "second")
    assert adapters.trainable_parameters(model) == adapters.trainable_parameters(model, "second")


def test_factors_scale_the_change_of_a_layer():
    layer, x = nn.Linear(6, 5), torch.randn(3, 6)
    model = nn.Sequential(layer)
    plain = model(x)
    adapters.attach(model, "lora", name="a")
    disturb(model)
    whole = model(x) - plain
    adapters.activate(model, {"a": 0.25})
    torch.testing.assert_close(model(x) - plain, whole / 4)


def test_heads_of_two_tasks_are_switched_along():
    model = vit().eval()
    head = model.head.weight.clone()
    for name, by in (("first", 0.1), ("second", 0.2)):
        adapters.attach(model, "sparse", name=name, also_train="head")
        disturb(model, name, by)
        adapters.activate(model, ())
        assert torch.equal(model.head.weight, head)
        assert not model.head.weight.requires_grad
    adapters.activate(model, "first")
    trained = model.head.weight.clone()
    assert not torch.equal(trained, head)
    with pytest.raises(ValueError, match="both train"):
        adapters.activate(model, ["first", "second"])
    adapters.activate(model, "second")
    assert not torch.equal(model.head.weight, trained)
    adapters.activate(model, "first")
    assert torch.equal(model.head.weight, trained)


def test_running_statistics_come_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    state = state_of(model)
    adapters.attach(model, "sparse", name="task")
    model.train()(images())
    assert not torch.equal(model[1].running_mean, state["1.running_mean"])
    adapters.detach(model, "task")
    assert_same(model, state)


def test_copies_and_pickles_work_on():
    model = vit().eval()
    adapters.attach(model, "sparse", name="task", also_train="head")
    disturb(model)
    out = model(images())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(images()), out)
        disturb(other)
        adapters.detach(other, "task")
    assert torch.equal(model(images()), out)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(batch_first, need_weights):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 4, batch_first=batch_first)})
    q, k = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    q, k = (q, k) if batch_first else (q.transpose(0, 1), k.transpose(0, 1))
    mask, padding = torch.rand(5, 7) < 0.3, torch.arange(7).expand(2, 7) >= torch.tensor([[7], [4]])
    mask[:, 0] = False
    cases = [((q, q, q), {}), ((q, k, k), {"attn_mask": mask, "key_padding_mask": padding})]
    plain = [model["attn"](*args, **kwargs, need_weights=need_weights) for args, kwargs in cases]
    adapters.attach(model, "sparse", name="task", target="attention")
    for before, (args, kwargs) in zip(plain, cases):
        torch.testing.assert_close(model["attn"](*args, **kwargs, need_weights=need_weights), before)
    disturb(model)
    out = [model["attn"](*args, **kwargs, need_weights=need_weights)[0] for args, kwargs in cases]
    out[1].square().sum().backward()
    assert all(p.grad is not None for p in adapters.trainable_parameters(model))
    adapters.merge(model, "task")
    merged = [model["attn"](*args, **kwargs, need_weights=need_weights)[0] for args, kwargs in cases]
    torch.testing.assert_close(out, merged)
    torch.testing.assert_close(out[1], reference_attention(model["attn"], q, k, mask, padding))


def reference_attention(layer, q, k, mask, padding):
    plain = nn.MultiheadAttention(layer.embed_dim, layer.num_heads, batch_first=layer.batch_first)
    plain.load_state_dict({name: p for name, p in layer.state_dict().items() if "adapters" not in name})
    return plain(q, k, k, attn_mask=mask, key_padding_mask=padding)[0]


FAULTS = [
    (ValueError, "'nothing_like_it' matches no layer", {"target": "nothing_like_it"}),
    (ValueError, "target .* is not a regular expression", {"target": "(("}),
    (ValueError, "also_train 'no_such' matches no parameter", {"also_train": "no_such"}),
    (ValueError, "density 0 must be a share", {"density": 0}),
    (ValueError, "density 1.5 must be a share", {"density": 1.5}),
    (ValueError, "density nan must be a share", {"density": float("nan")}),
    (ValueError, "structure 'diagonal' does not exist", {"structure": "diagonal"}),
    (ValueError, "structure '4:2' trains more", {"structure": "4:2"}),
    (ValueError, "select 'luck' does not exist", {"select": "luck"}),
    (ValueError, "select='gradient' needs loss", {"select": "gradient"}),
    (TypeError, "option 'ranks' is not one of adapter 'sparse'", {"ranks": 3}),
    (ValueError, "name 'a.b' must be letters", {"name": "a.b"}),
    (ValueError, "activations 'few' is unknown", {"activations": "few"}),
    (ValueError, "qkv 'x' must be of the letters", {"qkv": "x"}),
    (ValueError, r"block_size \(7, 7\) does not divide", {"structure": "block", "block_size": (7, 7)}),
]


@pytest.mark.parametrize(("error", "match", "options"), FAULTS)
@pytest.mark.parametrize("before", [False, True])
def test_faults_are_named_and_change_nothing(error, match, options, before):
    model = vit().eval()
    if before:
        adapters.attach(model, "lora", name="other")
        disturb(model)
    state, flags = state_of(model), [p.requires_grad for p in model.parameters()]
    classes, out = {name: type(m) for name, m in model.named_modules()}, model(images())
    with pytest.raises(error, match=match):
        adapters.attach(model, "sparse", **{"name": "task", **options})
    assert_same(model, state)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert torch.equal(model(images()), out)
    adapters.attach(model, "sparse", name="task")


def test_names_are_checked():
    model = vit()
    with pytest.raises(ValueError, match="has no adapter"):
        adapters.trainable_parameters(model)
    with pytest.raises(ValueError, match="adapter 'sprase' does not exist; nearest: sparse"):
        adapters.attach(model, "sprase")
    adapters.attach(model, "sparse", name="task")
    with pytest.raises(ValueError, match="name 'task' is taken"):
        adapters.attach(model, "lora", name="task")
    for act in (adapters.detach, adapters.merge, adapters.unmerge, adapters.activate, adapters.trainable_parameters):
        with pytest.raises(ValueError, match="name 'tusk' is no adapter of this model; it has 'task'"):
            act(model, "tusk")
