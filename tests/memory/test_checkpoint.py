"""Checkpointing from outside: the same gradients, buffers, random numbers and tree, with less memory."""

import copy
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from lean_arch.memory import apply_checkpointing
from tests.ruler import peak_bytes

POLICIES = ["all", "sqrt", "selective", 2]
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 3, "depth": 4}
DROPS = {"drop_path_rate": 0.3, "proj_drop_rate": 0.2, "attn_drop_rate": 0.1}
MODELS = {  # name -> (arch, options): chains, lists, nested stages, flat Sequentials, BatchNorm, dropout
    "vit": ("vit_tiny_patch16_224", VIT | DROPS),
    "resnet": ("resnet10t", {"drop_path_rate": 0.2}),
    "efficientnet": ("efficientnet_lite0", {"drop_rate": 0.2, "drop_path_rate": 0.2}),
    "vgg_nobn": ("vgg11", {"drop_rate": 0.5, "mlp_ratio": 0.02}),
    "convnext": ("convnext_atto", {"drop_path_rate": 0.2}),
    "regnet": ("regnety_002", {}),
    "twins": ("twins_svt_small", {"img_size": 64, "depths": [1, 1, 2, 1], "drop_path_rate": 0.2}),
}


def pair(name):
    """Two equal models; norms are shaken, as zero-initialised ones would hide the gradients behind them."""
    arch, options = MODELS[name]
    torch.manual_seed(0)
    plain = timm.create_model(arch, num_classes=10, **options).train()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.rand_like(parameter))
    return plain, copy.deepcopy(plain)


def images(name):
    size = 64 if name == "twins" else 32
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


def step(model, x):
    torch.manual_seed(2)
    F.cross_entropy(model(x).float(), torch.arange(len(x))).backward()


def assert_same(plain, lean, tolerance=1e-6):
    for (name, a), b in zip(plain.named_parameters(), lean.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            error = (a.grad.double() - b.grad.double()).norm()
            assert error <= tolerance * a.grad.double().norm(), f"{name}: {error}"
    for (name, a), b in zip(plain.named_buffers(), lean.buffers(), strict=True):
        assert torch.equal(a, b), name


def block(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, width))


class Counter:
    """Counts forward passes of the modules given."""

    def __init__(self, *modules):
        self.calls = 0
        for module in modules:
            module.register_forward_pre_hook(self.count)

    def count(self, module, args):
        self.calls += 1


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, policy) for name in ("vit", "resnet") for policy in POLICIES),
        ("efficientnet", "selective"),
        ("vgg_nobn", "sqrt"),
        ("vgg_nobn", "selective"),
        ("convnext", 3),
        ("regnet", "all"),
        ("twins", "all"),
    ],
)
def test_gradients_buffers_and_random_numbers_are_those_of_the_plain_model(name, policy):
    plain, lean = pair(name)
    x = images(name)
    assert apply_checkpointing(lean, policy) is lean
    step(plain, x)
    after = torch.get_rng_state()
    step(lean, x)
    assert torch.equal(after, torch.get_rng_state())
    assert_same(plain, lean)


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_memory_falls(name):
    plain, lean = pair(name)
    x = images(name).repeat(2, 1, 1, 1)
    peaks = {p: peak_bytes(lambda p=p: step(apply_checkpointing(lean, p), x)) for p in ("all", "selective")}
    whole = peak_bytes(lambda: step(plain, x))
    assert peaks["all"] < 0.8 * whole
    assert peaks["all"] <= peaks["selective"] < whole


def test_the_tree_stays_and_none_restores_it():
    plain, lean = pair("resnet")
    before = {name: (type(m), set(m.__dict__)) for name, m in lean.named_modules()}
    keys, text = list(lean.state_dict()), repr(lean)
    apply_checkpointing(lean, "sqrt")
    apply_checkpointing(lean, "all")
    changed = [m for name, m in lean.named_modules() if type(m) is not before[name][0]]
    assert len(changed) >= 4
    assert all(isinstance(m, before[name][0]) for name, m in lean.named_modules())
    assert list(lean.state_dict()) == keys
    assert repr(lean) == text
    lean.load_state_dict(plain.state_dict())
    apply_checkpointing(lean, "none")
    assert {name: (type(m), set(m.__dict__)) for name, m in lean.named_modules()} == before


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("policy", ["all", "sqrt"])
def test_copies_are_checkpointed_models_of_their_own(again, policy):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)))
    apply_checkpointing(model, policy)
    other = again(model)
    counter = Counter(*(module[0] for module in other))
    step(other, torch.ones(3, 4))
    assert counter.calls == 8
    assert all(p.grad is None for p in model.parameters())
    assert all(type(m) in (nn.Sequential, nn.Linear) for m in apply_checkpointing(other, "none").modules())


@pytest.mark.parametrize(
    ("policy", "segments"), [("all", 9), ("selective", 9), ("sqrt", 3), (2, 2), (9, 9), ("none", 0)]
)
def test_policies_cut_a_chain_into_as_many_segments_as_they_say(policy, segments, monkeypatch):
    from lean_arch.memory import checkpoint

    runs = []
    run = checkpoint._run
    monkeypatch.setattr(checkpoint, "_run", lambda *args, **options: runs.append(1) or run(*args, **options))
    model = apply_checkpointing(nn.Sequential(*(block() for _ in range(9))), policy)
    model(torch.ones(2, 8, requires_grad=True))
    assert len(runs) == segments


@pytest.mark.parametrize("policy", [0, -1, 5, True, 1.5, "most", None])
def test_bad_policies_are_refused_in_one_sentence_and_change_nothing(policy):
    model = apply_checkpointing(nn.Sequential(*(block() for _ in range(4))), "all")
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="checkpoint policy") as caught:
        apply_checkpointing(model, policy)
    assert "\n" not in str(caught.value)
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("frozen", [["patch_embed"], ["patch_embed", "pos_embed", "cls_token", "blocks.0."], [""]])
def test_frozen_layers(frozen):
    plain, lean = pair("vit")
    apply_checkpointing(lean, "all")
    for model in (plain, lean):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)) or name == "head.bias")
        step(model, images("vit"))
    assert_same(plain, lean)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_checkpointed_where_nothing_is_recorded(context, monkeypatch):
    from lean_arch.memory import checkpoint

    monkeypatch.setattr(checkpoint, "checkpoint", None)
    plain, lean = pair("resnet")
    apply_checkpointing(lean, "all")
    with context():
        assert torch.equal(plain.eval()(images("resnet")), lean.eval()(images("resnet")))


def test_eval_mode_with_gradients():
    plain, lean = (model.eval() for model in pair("resnet"))
    apply_checkpointing(lean, "all")
    for model in (plain, lean):
        step(model, images("resnet"))
    assert_same(plain, lean)


class Odd(nn.Module):
    """Takes keywords and a list that it changes, gives a dict with things that are no tensors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))

    def forward(self, features, *, scale, extra=None):
        features[0] = self.layers(features[0]) * scale
        return {"features": features, "count": len(features), "extra": extra}


class OddModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Odd(), Odd()])

    def forward(self, x):
        for odd in self.blocks:
            out = odd([x], scale=torch.full((1,), 2.0), extra="text")
            assert out["count"] == 1
            assert out["extra"] == "text"
            x = out["features"][0]
        return x


def test_keywords_lists_and_outputs_that_are_no_tensors():
    torch.manual_seed(0)
    plain = OddModel()
    lean = apply_checkpointing(copy.deepcopy(plain), "all")
    for model in (plain, lean):
        step(model, torch.ones(3, 4))
    assert_same(plain, lean)


def test_autocast_is_kept():
    torch.manual_seed(0)
    plain = nn.Sequential(*(block() for _ in range(3)))
    lean = apply_checkpointing(copy.deepcopy(plain), "all")
    for model in (plain, lean):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.linspace(-1, 1, 16).view(2, 8))
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    assert_same(plain, lean, tolerance=0)


def test_a_models_own_checkpointing_is_switched_off_and_on_again():
    _, lean = pair("vit")
    lean.set_grad_checkpointing(True)
    apply_checkpointing(lean, "all")
    apply_checkpointing(lean, "sqrt")
    counter = Counter(*(b.norm1 for b in lean.blocks))
    step(lean, images("vit"))
    assert counter.calls == 2 * len(lean.blocks)
    apply_checkpointing(lean, "none")
    assert lean.grad_checkpointing is True
    assert not any("own_checkpointing" in name for name in lean.__dict__)


def test_a_module_shared_by_two_blocks_runs_once_more_only():
    class Sharing(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared = shared
            self.own = nn.Linear(4, 4)

        def forward(self, x):
            return self.own(self.shared(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            self.blocks = nn.ModuleList([Sharing(self.shared), Sharing(self.shared)])

        def forward(self, x):
            for layer in self.blocks:
                x = layer(x)
            return x

    plain = Model()
    lean = apply_checkpointing(copy.deepcopy(plain), "all")
    counter = Counter(lean.shared[0])
    for model in (plain, lean):
        step(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert_same(plain, lean)
    assert counter.calls == 4


def test_hooks_of_a_block_run_once_and_autograd_grad_works():
    model = apply_checkpointing(nn.Sequential(*(block() for _ in range(3))), "all")
    counter = Counter(*model)
    x = torch.ones(2, 8, requires_grad=True)
    gradients = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert counter.calls == 3
    assert all(g.isfinite().all() for g in gradients)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_twice_and_second_derivatives(policy):
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(80, 80), nn.BatchNorm1d(80), nn.GELU(), nn.Linear(80, 80)) for _ in range(2))
    plain = nn.Sequential(*blocks)
    lean = apply_checkpointing(copy.deepcopy(plain), policy)
    x = torch.randn(4, 80, requires_grad=True)
    second = []
    for model in (plain, lean):
        out = model(x).square().sum()
        out.backward(retain_graph=True)
        out.backward()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        second += torch.autograd.grad(gradient.square().sum(), x)
    assert_same(plain, lean)
    assert (second[0] - second[1]).norm() <= 1e-5 * second[0].norm()


def test_selective_recomputes_no_long_reduction():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    blocks = (nn.Sequential(nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 80), nn.GELU()) for _ in range(2))
    model = nn.Sequential(*blocks)
    counts = {}
    for policy in ("none", "all", "selective"):
        names = []
        out = apply_checkpointing(model, policy)(torch.ones(2, 80, requires_grad=True)).sum()
        with Log():
            out.backward()
        counts[policy] = names.count("aten::addmm"), names.count("aten::gelu")
    assert counts == {"none": (0, 0), "all": (4, 2), "selective": (0, 2)}


def test_a_checkpointed_model_compiles():
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(2)))
    lean = apply_checkpointing(copy.deepcopy(plain), "all")
    x = torch.randn(4, 8)
    step(plain, x)
    step(torch.compile(lean, backend="eager"), x)
    assert_same(plain, lean)
