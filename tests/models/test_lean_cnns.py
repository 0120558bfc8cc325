"""MobileNets, EfficientNet and ConvNeXt: timm's models, weights and numbers, in a part of the memory."""

import copy
import re

import pytest
import timm
import torch
from timm.layers import convert_sync_batchnorm
from torch import nn

import lean_arch
from lean_arch.blocks.norm_act import KEEP
from lean_arch.models.lean_conversion import LEAN, make_lean
from tests.ruler import peak_bytes

TWINS = {
    "lean_mobilenetv1": "mobilenetv1_100",
    "lean_mobilenetv2": "mobilenetv2_100",
    "lean_mobilenetv3_small": "mobilenetv3_small_100",
    "lean_mobilenetv3_large": "mobilenetv3_large_100",
    "lean_mobilenetv4_conv_small": "mobilenetv4_conv_small",
    "lean_efficientnet_b0": "efficientnet_b0",
    "lean_convnext_atto": "convnext_atto",
}
each = pytest.mark.parametrize("name", TWINS)


def images(batch=2, size=64):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def twins(name, **options):
    torch.manual_seed(0)
    options = {"num_classes": 7} | options
    lean = {key: options.pop(key) for key in ("keep",) if key in options}
    return lean_arch.create_model(name, **lean, **options).train(), timm.create_model(TWINS[name], **options).train()


def step(model, x):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    logits = model(x)
    nn.functional.cross_entropy(logits, torch.arange(len(x)) % 7).backward()
    gradients = {f"grad of {n}": p.grad for n, p in model.named_parameters()}
    return {"logits": logits.detach()} | gradients | {n: b.clone() for n, b in model.named_buffers()}


def relative_error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def compare(got, want, exact):
    assert got.keys() == want.keys()
    for name, w in want.items():
        if exact and not re.search(r"(conv_dw|dw_\w+\.conv)\.weight", name):  # by another kernel than PyTorch's
            assert torch.equal(got[name], w), f"{name}: {relative_error(got[name], w):.1e}"
        else:
            assert relative_error(got[name], w) <= 1e-5, name


@pytest.mark.parametrize("keep", KEEP)
@each
def test_the_twins_numbers(name, keep):
    options = {"drop_path_rate": 0.3, "drop_rate": 0.2} if keep == "inputs" else {}
    lean, twin = twins(name, keep=keep, **options)
    lean.load_state_dict(twin.state_dict())
    for x in (images(), images(3, 48)):  # the second from the statistics that the first left
        compare(step(lean, x), step(twin, x), exact="convnext" not in name)
    assert relative_error(lean.eval()(images()), twin.eval()(images())) <= 1e-6


@each
def test_weights_go_both_ways(name):
    lean, twin = twins(name)
    step(lean, images())
    assert list(lean.state_dict()) == list(twin.state_dict())
    twin.load_state_dict(lean.state_dict())
    assert torch.equal(lean.eval()(images()), twin.eval()(images()))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(lean.parameters(), twin.parameters()))


@each
def test_keep_is_refused_by_name(name):
    with pytest.raises(ValueError, match="keep 'all' is unknown; convs, dear, inputs are known"):
        lean_arch.create_model(name, keep="all")


@each
def test_half_of_the_twins_peak(name):
    lean, twin = twins(name)
    x = images(4, 128)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each takes a copy of that gradient
    try:
        peaks = [peak_bytes(lambda: model(x).sum().backward()) for model in (lean, twin)]  # noqa: B023
    finally:
        torch.set_num_threads(threads)
    share = 0.55 if "mobilenetv4" in name else 0.5  # a fifth of its peak is the gradient of the last convolution
    assert peaks[0] <= share * peaks[1], peaks[0] / peaks[1]


@each
def test_features_only(name):
    lean = lean_arch.create_model(name, features_only=True)
    twin = timm.create_model(TWINS[name], features_only=True)
    assert any(type(m) in LEAN.values() for m in lean.modules())
    twin.load_state_dict(lean.state_dict())
    results = [model.train()(images()) for model in (lean, twin)]
    assert len(results[0]) == len(results[1]) > 3
    for got, want in zip(*results):
        assert relative_error(got, want) <= 1e-5
    gradients = [
        torch.autograd.grad(sum(map(torch.sum, r)), list(m.parameters())) for r, m in zip(results, (lean, twin))
    ]
    scale = max(w.norm() for w in gradients[1])
    assert all((g - w).norm() <= 1e-5 * scale for g, w in zip(*gradients))


@each
def test_intermediates_and_classifier(name):
    lean, twin = twins(name)
    twin.load_state_dict(lean.state_dict())
    final, taken = lean.forward_intermediates(images())
    wanted = twin.forward_intermediates(images())
    assert relative_error(final, wanted[0]) <= 1e-5
    assert all(relative_error(g, w) <= 1e-5 for g, w in zip(taken, wanted[1], strict=True))
    for model in (lean, twin):
        torch.manual_seed(5)
        model.eval().reset_classifier(3)
    assert lean(images()).shape == (2, 3)
    assert relative_error(lean(images()), twin(images())) <= 1e-6
    lean.reset_classifier(0)
    assert lean(images()).shape == (2, lean.head_hidden_size)


@each
def test_checkpointed(name):
    """timm's own switch still works, and gives the same gradients."""
    lean, _ = twins(name)
    other = copy.deepcopy(lean)
    other.set_grad_checkpointing()
    got, want = step(other, images()), step(lean, images())
    for key, w in want.items():
        if "running" not in key and "num_batches" not in key:
            assert torch.equal(got[key], w), key


@pytest.mark.parametrize("name", ["lean_mobilenetv3_small", "lean_convnext_atto"])
def test_exports_and_scripts(name):
    lean = twins(name)[0].eval()
    x = images()
    want = lean(x)
    assert relative_error(torch.export.export(lean, (x,)).module()(x), want) <= 1e-6
    assert relative_error(torch.jit.script(lean)(x), want) <= 1e-5
    assert torch.equal(copy.deepcopy(lean)(x), want)


def test_a_norm_that_has_become_part_of_its_convolution():
    """Also among the first layers, which are one chain."""
    pair = twins("lean_mobilenetv1")
    pair[1].load_state_dict(pair[0].state_dict())
    for model in pair:
        model.blocks[0][0].bn2 = nn.Identity()
    compare(*(step(model, images()) for model in pair), exact=True)


def test_sync_batch_norm():
    """Converted as timm converts its models."""
    lean, _ = twins("lean_mobilenetv3_small")
    step(lean, images())
    synced = convert_sync_batchnorm(copy.deepcopy(lean)).eval()
    assert not any(isinstance(m, nn.BatchNorm2d) for m in synced.modules())
    compare(step(synced, images()), step(lean.eval(), images()), exact=True)


@pytest.mark.parametrize(
    "twin",
    [
        "convnextv2_atto",
        "mobilenetv3_rw",
        "tf_efficientnet_b0",
        "mnasnet_small",
        "test_efficientnet_ln",
        "ghostnetv3_050",
    ],
)
def test_other_models_of_timm(twin):
    """What of them has no lean form runs as it is."""
    torch.manual_seed(0)
    plain = timm.create_model(twin, num_classes=7).train()
    for p in plain.parameters():
        p.data += torch.randn_like(p) * 0.01  # where timm starts at nought, nothing would show
    lean = make_lean(copy.deepcopy(plain))
    assert any(type(m) in LEAN.values() for m in lean.modules())
    got, want = step(lean, images()), step(plain, images())
    assert relative_error(got["logits"], want["logits"]) <= 1e-5
    scale = max(w.norm() for key, w in want.items() if "grad" in key)
    for key, w in want.items():
        assert (got[key].double() - w.double()).norm() <= 1e-5 * max(scale, w.double().norm()), key


def test_other_sizes_are_refused_by_name():
    lean, _ = twins("lean_mobilenetv2")
    with pytest.raises(ValueError, match=r"cannot train on an input of shape \(1, \d+, 1, 1\), one value a channel"):
        lean(images(1, 32))
