"""The ladder reads blocks of any model, keeps nothing of the base for the backward pass, and learns."""

import copy
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from lean_arch import adapters
from lean_arch.adapters.ladder import SideNetwork
from lean_arch.memory import apply_checkpointing, measure

ARCHS = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "resnet18": {},
    "convnext_atto": {},
    "swin_tiny_patch4_window7_224": {},
    "mixer_s32_224": {},
    "lean_vit_tiny": {"img_size": 64, "depth": 2},
    "lean_mobilenetv3_small": {},
}


def build(arch="vit_tiny_patch16_224"):
    torch.manual_seed(0)
    model = timm.create_model(arch, num_classes=5, **ARCHS[arch])
    return model, torch.randn(2, 3, *[ARCHS[arch].get("img_size", 224)] * 2)


@torch.no_grad()
def disturb(model):
    for parameter in adapters.trainable_parameters(model):
        parameter += 0.1 * torch.randn_like(parameter)


@pytest.mark.parametrize("arch", ARCHS)
def test_any_model(arch):
    model, x = build(arch)
    model.eval()
    classes, plain = {name: type(m) for name, m in model.named_modules()}, model(x)
    keys = list(model.state_dict())
    adapters.attach(model, "ladder", name="task", also_train="head.*|fc|classifier")
    assert torch.equal(model(x), plain)
    disturb(model)
    out = model(x)
    assert not torch.allclose(out, plain)
    out.square().sum().backward()
    with_gradients = {p for p in model.parameters() if p.grad is not None}
    assert with_gradients == set(adapters.trainable_parameters(model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), out)
    adapters.activate(model, ())
    assert torch.equal(model(x), plain)
    adapters.detach(model, "task")
    assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == keys
    assert {name: type(m) for name, m in model.named_modules()} == classes


def test_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=3, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    ids = torch.randint(50, (2, 7))
    plain = model(ids).last_hidden_state
    adapters.attach(model, "ladder", name="task", every=1, sample={"input_ids": ids})
    assert torch.equal(model(ids).last_hidden_state, plain)
    disturb(model)
    model(ids).last_hidden_state.sum().backward()
    assert all(p.grad is not None for p in model.adapters["task"].parameters())


def test_nothing_of_the_base_is_kept():
    peaks = {}
    for method in ("lora", "ladder"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=128)
        adapters.attach(model, method, name="task")
        x, targets = torch.randn(8, 3, 128, 128), torch.randint(10, (8,))

        def step(model=model, x=x, targets=targets):
            F.cross_entropy(model(x), targets).backward()

        step()
        peaks[method] = measure(step, model, x, targets).by_category["activations"]
    assert peaks["ladder"] < 0.2 * peaks["lora"]


def test_files(tmp_path):
    model, x = build()
    adapters.attach(model.eval(), "ladder", name="task", reduction=4, every=1)
    disturb(model)
    adapters.save(model, "task", tmp_path / "task")
    other, _ = build()
    adapters.load(other.eval(), tmp_path / "task")
    assert torch.equal(other(x), model(x))
    with pytest.raises(ValueError, match="no weight of the base can hold"):
        adapters.merge(model, "task")
    deeper = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64, depth=2)
    with pytest.raises(ValueError, match="has not the blocks"):
        adapters.load(deeper, tmp_path / "task", check_base=False)


def test_it_learns_more_than_a_head_alone():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).repeat_interleave(4, 1).repeat_interleave(4, 2)
    x, targets = images[:256, None].expand(-1, 3, -1, -1), torch.tensor(digits.target[:256])
    losses = {}
    for method in ("ladder", "bias"):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=10)
        options = {} if method == "ladder" else {"target": "norm"}  # of the last norm: a head in effect
        adapters.attach(model, method, name="task", also_train="head", **options)
        optimizer = torch.optim.AdamW(adapters.trainable_parameters(model), 5e-3)
        for _ in range(40):
            loss = F.cross_entropy(model(x), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[method] = loss.item()
    assert losses["ladder"] < 0.7 * losses["bias"]


def test_after_a_failure_and_under_checkpointing():
    model, x = build()
    adapters.attach(model, "ladder", name="task", every=1)
    disturb(model)
    out = model(x)
    with pytest.raises(RuntimeError):
        model.head(model.blocks[0](torch.zeros(1, 3, 5)))
    copy.deepcopy(model)
    assert torch.equal(model(x), out)
    first, second = model(x), model(x + 1)
    (first.sum() + second.sum()).backward()
    grads = [p.grad.clone() for p in adapters.trainable_parameters(model)]
    model.zero_grad()
    apply_checkpointing(model, "all")
    (model(x).sum() + model(x + 1).sum()).backward()
    for grad, parameter in zip(grads, adapters.trainable_parameters(model)):
        torch.testing.assert_close(parameter.grad, grad)


def test_two_ladders():
    model, x = build()
    plain = model.eval()(x)
    for name in ("first", "second"):
        adapters.attach(model, "ladder", name=name)
        disturb(model)
    adapters.detach(model, "first")
    assert not torch.allclose(model(x), plain)
    adapters.detach(model, "second")
    assert torch.equal(model(x), plain)


def test_faults():
    with pytest.raises(ValueError, match="no blocks that a ladder could read"):
        adapters.attach(nn.ReLU(), "ladder", sample=torch.zeros(1, 3))
    model, _ = build()
    with pytest.raises(ValueError, match="reduction 0 must be a whole number"):
        adapters.attach(model, "ladder", reduction=0)
    with pytest.raises(ValueError, match="target 'mlp' means nothing"):
        adapters.attach(model, "ladder", target="mlp")
    plain = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)))
    with pytest.raises(ValueError, match="needs sample="):
        adapters.attach(plain, "ladder")
    adapters.attach(plain, "ladder", sample=torch.zeros(1, 4, 8))
    assert isinstance(plain.adapters["default"], SideNetwork)
