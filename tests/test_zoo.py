"""What every architecture of the zoo promises."""

import pytest
import timm
import torch

import lean_arch

MILLION_PARAMETERS = {  # of the papers' models of the same sizes
    "lean_vit": 5.72,
    "lean_vit_tiny": 5.72,
    "lean_vit_small": 22.05,
    "lean_vit_base": 86.57,
    "lean_vit_large": 304.33,
}


def test_names():
    names = lean_arch.list_models()
    assert names == sorted(MILLION_PARAMETERS)
    assert set(names) <= set(timm.list_models())
    assert lean_arch.list_models("*_small") == ["lean_vit_small"]


def test_unknown_name_gets_the_nearest_ones():
    with pytest.raises(ValueError, match=r"arch 'lean_vit_smol' does not exist; nearest: lean_vit_small"):
        lean_arch.create_model("lean_vit_smol")
    with pytest.raises(ValueError, match=r"arch '%%' does not exist; the zoo has lean_vit"):
        lean_arch.create_model("%%")


def test_timm_architectures_too():
    assert lean_arch.create_model("resnet18", num_classes=3).get_classifier().out_features == 3


@pytest.mark.parametrize("name", lean_arch.list_models())
def test_size_and_state_dict(name):
    with torch.device("meta"):
        model = lean_arch.create_model(name)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(MILLION_PARAMETERS[name], abs=0.01)
    assert len(model.state_dict()) == len(list(model.parameters())) + len(list(model.buffers()))
    x = torch.empty(2, *model.default_cfg["input_size"], device="meta")
    assert model(x).shape == (2, 1000)
