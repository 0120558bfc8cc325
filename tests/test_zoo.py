"""What every architecture of the zoo promises."""

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lean_arch
from lean_arch.models.lean_sequence import VOCABULARY
from lean_arch.registry import SEQUENCE_MODELS

MILLION_PARAMETERS = {  # those for images: of the papers' models of the same sizes
    "lean_bigbird": 0.82,
    "lean_bigbird_tiny": 0.82,
    "lean_bigbird_small": 25.33,
    "lean_bigbird_base": 85.21,
    "lean_convnext_atto": 3.70,
    "lean_convnext_base": 88.59,
    "lean_convnext_small": 50.22,
    "lean_convnext_tiny": 28.59,
    "lean_efficientnet_b0": 5.29,
    "lean_efficientnet_b1": 7.79,
    "lean_efficientnet_b2": 9.11,
    "lean_efficientnet_b3": 12.23,
    "lean_efficientnet_b4": 19.34,
    "lean_lm": 0.76,
    "lean_lm_tiny": 0.76,
    "lean_lm_small": 33.21,
    "lean_lm_base": 264.71,
    "lean_longformer": 1.07,
    "lean_longformer_tiny": 1.07,
    "lean_longformer_small": 32.97,
    "lean_longformer_base": 110.26,
    "lean_mobilenetv1": 4.23,
    "lean_mobilenetv2": 3.50,
    "lean_mobilenetv3_large": 5.48,
    "lean_mobilenetv3_small": 2.54,
    "lean_mobilenetv4_conv_small": 3.77,
    "lean_reformer": 0.79,
    "lean_reformer_tiny": 0.79,
    "lean_reformer_small": 36.39,
    "lean_reformer_base": 145.20,
    "lean_revnet": 5.21,
    "lean_vit": 5.72,
    "lean_vit_tiny": 5.72,
    "lean_vit_small": 22.05,
    "lean_vit_base": 86.57,
    "lean_vit_large": 304.33,
}


def test_names():
    names = lean_arch.list_models()
    assert names == sorted(MILLION_PARAMETERS)
    assert set(names) - set(SEQUENCE_MODELS.names()) == set(timm.list_models("lean_*"))
    assert lean_arch.list_models("*_small") == [
        "lean_bigbird_small",
        "lean_convnext_small",
        "lean_lm_small",
        "lean_longformer_small",
        "lean_mobilenetv3_small",
        "lean_mobilenetv4_conv_small",
        "lean_reformer_small",
        "lean_vit_small",
    ]


def test_unknown_name_gets_the_nearest_ones():
    with pytest.raises(ValueError, match=r"arch 'lean_vit_smol' does not exist; nearest: lean_vit_small"):
        lean_arch.create_model("lean_vit_smol")
    with pytest.raises(ValueError, match=r"arch '%%' does not exist; there are lean_"):
        lean_arch.create_model("%%")


def test_timm_architectures_too():
    assert lean_arch.create_model("resnet18", num_classes=3).get_classifier().out_features == 3


@pytest.mark.parametrize("name", lean_arch.list_models())
def test_size_and_state_dict(name):
    of_sequences = name in SEQUENCE_MODELS
    with FakeTensorMode() if of_sequences else torch.device("meta"):
        model = lean_arch.create_model(name)
        tensors = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        assert len({t.untyped_storage()._cdata for t in model.state_dict().values()}) == len(tensors)
        count = sum(p.numel() for p in model.parameters()) / 1e6
        assert count == pytest.approx(MILLION_PARAMETERS[name], abs=0.01)
        if of_sequences:
            tokens = torch.zeros(2, model.seq_len, dtype=torch.int64)
            assert model(tokens).shape == (2, model.seq_len, VOCABULARY)
            assert model(tokens, targets=tokens).shape == ()
        else:
            assert model(torch.empty(2, *model.default_cfg["input_size"])).shape == (2, 1000)
