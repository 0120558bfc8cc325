"""The summary counts what is trained and kept, and leaves the model as it was."""

import timm
import torch

from lean_arch import adapters


def test_rows_and_that_nothing_changes():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    x = torch.randn(4, 3, 32, 32)
    full = sum(p.numel() for p in model.parameters())
    adapters.attach(model, "sparse", name="first", also_train="head")
    adapters.attach(model, "bias", name="second", target="blocks.*")
    adapters.activate(model, {"first": 0.5})
    state = {name: t.clone() for name, t in model.state_dict().items()}
    flags, classes = [p.requires_grad for p in model.parameters()], [type(m) for m in model.modules()]
    found = adapters.summary(model, x)
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["first", "second", "full", "lora"]
    assert rows["full"].trained == full
    first = adapters.trainable_parameters(model, "first")
    assert rows["first"].trained == sum(p.numel() for p in first)
    assert rows["first"].optimizer == 2 * rows["first"].gradients == 8 * rows["first"].trained
    assert rows["first"].activations < 0.8 * min(rows["lora"].activations, rows["full"].activations)
    assert model.blocks[0].attn.qkv.bias.requires_grad is False  # the second one is off
    assert str(found).splitlines()[1].split()[:2] == ["first", f"{rows['first'].trained:,}"]
    assert adapters.summary(model).rows[0].activations is None
    assert all(torch.equal(model.state_dict()[name], t) for name, t in state.items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [type(m) for m in model.modules()] == classes
    assert model.blocks[0].attn.qkv.adapters["first"].strength == 0.5
