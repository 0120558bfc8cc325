"""lean_vit: a timm model whose memory does not grow with depth and whose gradients are the stored ones."""

import pytest
import timm
import torch
from torch import nn

import lean_arch
from tests.ruler import peak_bytes


def build(**kwargs):
    torch.manual_seed(0)
    options = {"embed_dim": 32, "num_heads": 2, "depth": 3, "img_size": 32, "patch_size": 8, "num_classes": 7}
    model = lean_arch.create_model("lean_vit", **(options | kwargs)).train()
    model.blocks.least_chunk = 1  # so that small batches are cut as large ones are
    return model


def images(batch=4, size=32, channels=3):
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def gradients(model, x, reversible, autocast=False):
    model.set_reversible(reversible)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(x)
    nn.functional.cross_entropy(logits.float(), torch.arange(len(x)) % 7).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, 4),
        ({"drop_path_rate": 0.3, "proj_drop_rate": 0.2, "attn_drop_rate": 0.1, "pos_drop_rate": 0.1}, 5),
        ({"init_values": 1e-2, "global_pool": "avg", "class_token": False, "reg_tokens": 2}, 1),
        ({"chunks": 1, "qk_norm": True, "pre_norm": True}, 3),
        ({"depth": 12, "drop_path_rate": 0.5}, 2),
    ],
)
def test_gradients_equal_stored_ones_bit_for_bit(options, batch, autocast):
    model = build(**options)
    x = images(batch)
    lean, stored = (gradients(model, x, r, autocast) for r in (True, False))
    for name, grad in stored.items():
        assert grad is not None, name
        assert torch.equal(lean[name], grad), name


def test_gradients_match_float64():
    """Against the same network in float64, whose streams are finer by 2^26; at weights of a trained size."""
    model = build()
    for p in model.parameters():
        nn.init.normal_(p, std=0.15)
    lean = gradients(model, images(), True)
    exact = gradients(model.double(), images().double(), False)
    for name, grad in exact.items():
        error = (lean[name].double() - grad).norm() / grad.norm()
        assert error < 5e-5, f"{name}: {error:.1e}"


def test_depth_costs_nothing():
    def cost(depth, reversible):
        model = build(depth=depth)
        model.set_reversible(reversible)
        x = images(16)
        return peak_bytes(lambda: model(x).square().sum().backward())

    lean, stored = ((cost(14, r) - cost(4, r)) / 10 for r in (True, False))
    assert lean <= 0.01 * stored


def test_autocast_weights_are_not_kept():
    """Under autocast a plain ViT keeps 2 bytes a weight until the context ends; here none."""
    model = build(embed_dim=128, depth=8)
    x = images(1)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().sum().backward()

    weights = sum(p.numel() * 2 for p in model.blocks.parameters())
    assert peak_bytes(step) < 0.7 * weights


@pytest.mark.parametrize("size", [16, 24, 40])
def test_any_image_size_and_channels(size):
    model = build(img_size=size, in_chans=1)
    assert model(images(2, size, 1)).shape == (2, 7)
    dynamic = build(dynamic_img_size=True)
    assert dynamic(images(2, size)).shape == (2, 7)


def test_reset_classifier_and_input_size():
    model = build()
    model.reset_classifier(3)
    assert model(images()).shape == (4, 3)
    model.reset_classifier(0, "avg")
    assert model(images()).shape == (4, 32)
    model.set_input_size((48, 48))
    assert model(images(2, 48)).shape == (2, 32)


def test_forward_intermediates():
    model = build(depth=5).eval()
    x = images(2)
    final, taken = model.forward_intermediates(x)
    assert len(taken) == 5
    assert all(t.shape == (2, 32, 4, 4) for t in taken)
    assert torch.equal(final, model.forward_features(x))
    some = model.forward_intermediates(x, indices=[1, 3], intermediates_only=True, stop_early=True)
    assert torch.equal(some[0], taken[1])
    assert torch.equal(some[1], taken[3])
    out = model.forward_intermediates(x, 1, output_dict=True, return_prefix_tokens=True, output_fmt="NLC", norm=True)
    assert out["image_intermediates"][0].shape == (2, 16, 32)
    assert out["image_intermediates_prefix"][0].shape == (2, 1, 32)
    assert torch.equal(out["image_features"], final)
    with pytest.raises(ValueError, match="output_fmt"):
        model.forward_intermediates(x, output_fmt="NHWC")
    with pytest.raises(ValueError, match="attn_mask"):
        model.forward_intermediates(x, attn_mask=torch.ones(1))


def test_intermediates_give_the_gradients_of_a_stored_run():
    model = build(depth=5)
    x = images(2)
    grads = []
    for reversible in (True, False):
        model.set_reversible(reversible)
        model.zero_grad()
        taken = model.forward_intermediates(x, indices=[0, 2, 4], intermediates_only=True)
        sum(t.square().sum() for t in taken).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, rtol=1e-5, atol=1e-6, msg=name)


def test_features_only_and_pruning():
    features = timm.create_model("lean_vit", features_only=True, img_size=32, patch_size=8, depth=4, out_indices=(1, 3))
    assert [f.shape for f in features(images(2))] == [(2, 192, 4, 4)] * 2
    model = build(depth=4)
    model.prune_intermediate_layers([1])
    assert len(model.blocks) == 2
    assert model.forward_features(images(2)).shape == (2, 17, 32)


def test_frozen_backbone_trains_the_head_only():
    model = build()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model(images()).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {"head.weight", "head.bias"}


def test_compile_gives_the_same_gradients():
    model = build()
    x = images(2)
    want = gradients(model, x, True)
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    nn.functional.cross_entropy(compiled(x), torch.arange(2)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-5, atol=1e-6, msg=name)


def test_grad_checkpointing_switch_is_the_reversible_one():
    model = build()
    model.set_grad_checkpointing(False)
    assert not model.blocks.reversible
    model.set_grad_checkpointing()
    assert model.blocks.reversible
