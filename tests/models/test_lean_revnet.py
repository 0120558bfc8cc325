"""lean_revnet: a timm model whose memory does not grow with a stage's depth and whose gradients are the stored ones."""

import copy

import pytest
import torch
from torch import nn

import lean_arch
from tests.ruler import peak_bytes


def build(**kwargs):
    torch.manual_seed(0)
    options = {"depths": (1, 2, 1, 2), "widths": (8, 12, 16, 20), "num_classes": 7}
    model = lean_arch.create_model("lean_revnet", **(options | kwargs)).train()
    for name, p in model.named_parameters():
        if name.endswith("bn3.weight"):  # begins at 0, with which no gradient goes further
            nn.init.constant_(p, 0.7)
    return model


def images(batch=4, height=64, width=72, channels=3):
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1))


def gradients(model, x, reversible, autocast=False):
    """Of a copy: the running statistics of `model` stay as they are."""
    model = copy.deepcopy(model)
    model.set_reversible(reversible)
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(x)
    nn.functional.cross_entropy(logits.float(), torch.arange(len(x)) % 7).backward()
    return {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, 4),
        ({"act": "silu", "drop_path_rate": 0.4, "drop_rate": 0.2}, 5),
        ({"depths": (3, 1, 4, 1), "widths": (6, 8, 10, 14), "in_chans": 2, "global_pool": "catavgmax"}, 3),
    ],
)
def test_gradients_and_statistics_equal_stored_ones_bit_for_bit(options, batch, autocast):
    model = build(**options)
    x = images(batch, channels=options.get("in_chans", 3))
    lean, stored = (gradients(model, x, r, autocast) for r in (True, False))
    for of_lean, of_stored in zip(lean, stored):
        for name, value in of_stored.items():
            assert value is not None, name
            assert torch.equal(of_lean[name], value), name


def test_stages_begin_as_the_identity():
    stage = lean_arch.create_model("lean_revnet").train().stages[0]
    x = images(2, 32, 40)[:, :1].expand(-1, 32, -1, -1)
    torch.testing.assert_close(stage.blocks((x, -x)), (x, -x), rtol=0, atol=2**-18)


def test_frozen_functions_are_rebuilt_too():
    model = build()
    for name, p in model.named_parameters():
        p.requires_grad_(".blocks." not in name)
    (lean, _), (stored, _) = (gradients(model, images(), r, autocast=True) for r in (True, False))
    assert torch.equal(lean["stem.weight"], stored["stem.weight"])


def textbook(model, x):
    """RevNet's equations on plain floating-point numbers, of torch's own functions."""

    def norm(x, bn, act=True):
        x = nn.functional.batch_norm(x, None, None, bn.weight, bn.bias, training=True, eps=bn.eps)
        return x.relu() if act else x

    def residual(block, x):
        x = norm(nn.functional.conv2d(x, block.conv_pw.weight), block.bn1)
        x = norm(nn.functional.conv2d(x, block.conv_dw.weight, padding=1, groups=x.shape[1]), block.bn2)
        return norm(nn.functional.conv2d(x, block.conv_pwl.weight), block.bn3, act=False)

    x = nn.functional.conv2d(x, model.stem.weight, stride=2, padding=1)
    for stage in model.stages:
        bn, conv = stage.downsample
        x = nn.functional.conv2d(norm(x, bn), conv.weight, stride=2)
        x1, x2 = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        for pair in stage.blocks:
            x1 = x1 + residual(pair.f[0], x2)
            x2 = x2 + residual(pair.g[0], x1)
        x = torch.cat((x1, x2), 1)
    return norm(x, model.norm).mean((2, 3)) @ model.head.fc.weight.T + model.head.fc.bias


def test_gradients_match_float64():
    """In float64, whose streams round to 2^-44; float32's 2^-18 may carry a number over ReLU's edge."""
    model, x = build().double(), images().double()
    exact = copy.deepcopy(model)
    nn.functional.cross_entropy(textbook(exact, x), torch.arange(len(x)) % 7).backward()
    nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 7).backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters()):
        # The next norm takes away what a last bias adds: its gradient is 0 but for rounding.
        error = (p.grad - q.grad).norm() / (1.0 if name.endswith("bn3.bias") else q.grad.norm())
        assert error < 1e-8, f"{name}: {error:.1e}"


def test_depth_costs_nothing():
    def cost(depth, reversible):
        model = build(depths=(depth,) * 4, widths=(16, 16, 16, 16))
        model.set_reversible(reversible)
        x = images(4)
        return peak_bytes(lambda: model(x).sum().backward())

    lean, stored = (cost(4, r) - cost(2, r) for r in (True, False))
    assert lean < 0.02 * stored


def test_intermediates_and_features():
    model, x = build().eval(), images()
    final, maps = model.forward_intermediates(x)
    assert torch.equal(final, model.forward_features(x))
    assert [m.shape[1:] for m in maps] == [(8, 16, 18), (12, 8, 9), (16, 4, 4), (20, 2, 2)]
    two = model.forward_intermediates(x, indices=[1, 3], norm=True, intermediates_only=True)
    assert torch.equal(two[0], maps[1])
    assert torch.equal(two[1], final)
    part = build(features_only=True, out_indices=(0, 2)).eval()
    assert part.feature_info.channels() == [8, 16]
    assert part.feature_info.reduction() == [4, 16]
    assert all(torch.equal(a, b) for a, b in zip(part(x), maps[::2], strict=True))
    with pytest.raises(ValueError, match="output_fmt must be NCHW, got 'NLC'"):
        model.forward_intermediates(x, output_fmt="NLC")


def test_scripts_and_exports():
    model, x = build(depths=(1, 1, 1, 1)).eval(), images()
    want = model(x)
    for other in (torch.jit.script(model), torch.export.export(model, (x,)).module()):
        torch.testing.assert_close(other(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (2, 2, 2)}, r"depths must be 4 whole numbers, one a stage, got \(2, 2, 2\)"),
        ({"depths": (2, 2, 0, 2)}, r"depths\[2\] 0 must be a whole number, 1 or more"),
        ({"widths": 64}, "widths must be 4 whole numbers, one a stage, got 64"),
        ({"widths": (8, 9, 10, 12)}, r"widths \(8, 9, 10, 12\) must be even, as each stage has two streams; 9 is odd"),
        ({"drop_path_rate": 1.0}, "drop_path_rate 1.0 must be a share"),
        ({"act": "swish2"}, "act 'swish2' is unknown"),
    ],
)
def test_bad_input_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
