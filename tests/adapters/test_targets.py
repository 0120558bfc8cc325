"""What presets and regular expressions find, in models of timm and of transformers."""

import pytest
import timm
import torch
from torch import nn

from lean_arch import adapters
from lean_arch.adapters.targets import find_layers


def names(model, target):
    return [layer.name for layer in find_layers(model, target)]


def test_presets_on_a_vision_transformer():
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    inside = ["blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"]
    assert names(model, "layers") == ["patch_embed.proj", *inside, "head"]
    assert names(model, "linear") == [*inside, "head"]
    assert names(model, "attention") == inside[:2]
    assert names(model, "mlp") == inside[2:]
    assert names(model, "convs") == ["patch_embed.proj"]
    assert names(model, "norms") == ["blocks.0.norm1", "blocks.0.norm2", "norm"]
    assert names(model, r"blocks\.\d+\.mlp\.fc1") == ["blocks.0.mlp.fc1"]


@pytest.mark.parametrize(
    "arch", ["resnet18", "convnext_atto", "swin_tiny_patch4_window7_224", "mixer_s32_224", "levit_128s"]
)
def test_every_linear_layer_and_convolution_of_timm_is_found(arch):
    with torch.device("meta"):
        model = timm.create_model(arch)
    plain = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert names(model, "layers") == plain


def test_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 6}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    assert names(gpt2, "attention") == ["transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"]
    assert names(gpt2, "embeddings") == ["transformer.wte", "transformer.wpe"]
    ids = torch.arange(5)[None]
    plain = gpt2(ids).logits
    for target in ("attention", "mlp", "embeddings"):
        adapters.attach(gpt2, "sparse", name="task", target=target, structure="unstructured", density=0.3)
        with torch.no_grad():
            for parameter in adapters.trainable_parameters(gpt2):
                parameter += 0.1 * torch.randn_like(parameter)
        out = gpt2(ids).logits
        assert not torch.allclose(out, plain)
        if target == "embeddings":  # the head shares their weight
            with pytest.raises(ValueError, match="'lm_head' shares"):
                adapters.merge(gpt2, "task")
        else:
            adapters.merge(gpt2, "task")
            torch.testing.assert_close(gpt2(ids).logits, out)
        adapters.detach(gpt2, "task")
        assert torch.equal(gpt2(ids).logits, plain)
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=16, vocab_size=11
    )
    bert = transformers.BertModel(config)
    found = names(bert, "attention")
    assert [name.split("encoder.layer.0.attention.")[1] for name in found] == [
        "self.query", "self.key", "self.value", "output.dense",
    ]  # fmt: skip


def test_a_layer_shared_by_two_places_is_adapted_once():
    shared = nn.Linear(4, 4)
    model, x = nn.Sequential(shared, nn.ReLU(), shared), torch.randn(2, 4)
    plain = model(x)
    adapters.attach(model, "sparse", name="task", density=0.5)
    assert len(adapters.trainable_parameters(model)) == 1
    assert torch.equal(model(x), plain)
    adapters.detach(model, "task")
    assert type(model[2]) is nn.Linear


def test_layers_that_compute_something_else_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4), nn.Embedding(5, 4, max_norm=1.0))
    assert names(model, "layers") == ["1"]
    with pytest.raises(ValueError, match="target '0' matches no layer"):
        names(model, "0")
    with pytest.raises(ValueError, match="matches no layer; this model has none"):
        names(nn.Sequential(nn.ReLU()), "layers")
    with pytest.raises(TypeError, match="target 3 must be a string"):
        names(model, 3)
