"""Fine-tuning in the loop: where weights come from, what an adapter run leaves, and that it resumes to the bit."""

import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from lean_arch import adapters
from lean_arch.training.adapter import parse_adapter
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.loop import train
from lean_arch.training.recipe import prepare


def run(folder, **options):
    defaults = {"arch": "test_vit", "img_size": 32, "batch_size": 16, "max_steps": 3, "precision": "fp32"}
    return train(TrainConfig(**(defaults | {"output": str(folder)} | options)), Console(quiet=True))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    run(folder)
    return folder


@pytest.mark.parametrize(
    "method", ["sparse", "sparse:structure=unstructured,select=gradient", "lora", "bias", "ladder"]
)
def test_a_run_leaves_the_adapter_and_merged_weights(base, tmp_path, method):
    summary = run(tmp_path / "run", init_from=str(base), adapter=method)
    assert summary["adapter"] == method
    assert summary["trainable_params"] < 0.5 * summary["params"]
    assert abs(summary["predicted_peak_bytes"] / summary["peak_bytes"] - 1) < 0.03
    assert json.loads((tmp_path / "run" / "adapter" / "adapter.json").read_text())["method"] == method.split(":")[0]
    weights, before = load_file(tmp_path / "run" / "model.safetensors"), load_file(base / "model.safetensors")
    if method == "ladder":
        assert weights.keys() > before.keys()
    else:
        assert weights.keys() == before.keys()
        assert any(not torch.equal(weights[name], before[name]) for name in before)


def test_the_adapter_folder_loads_onto_the_base(base, tmp_path):
    run(tmp_path, init_from=str(base), adapter="sparse")
    recipe = prepare(TrainConfig(arch="test_vit", img_size=32, init_from=str(base), precision="fp32"))
    model = recipe.model.eval()
    adapters.load(model, tmp_path / "adapter")
    adapters.merge(model, "task")
    merged = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in merged.items())


def test_it_resumes_to_the_bit_from_what_changes_alone(base, tmp_path):
    options = {"init_from": str(base), "adapter": "lora", "max_steps": 4, "checkpoint_every": 2}
    run(tmp_path / "whole", **options)
    run(tmp_path / "parts", **options, stop_after=2)
    checkpoint = tmp_path / "parts" / "checkpoints" / "step_000002"
    assert (checkpoint / "model.safetensors").stat().st_size < 0.3 * (base / "model.safetensors").stat().st_size
    run(tmp_path / "parts", **options, resume=True)
    for name in ("model.safetensors", "adapter/adapter.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    losses = [[line.split(",")[1] for line in (tmp_path / f / "metrics.csv").open()] for f in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_resuming_on_another_base_is_refused(base, tmp_path):
    weights = load_file(base / "model.safetensors")
    file = tmp_path / "base.safetensors"
    save_file(weights, file)
    options = {"init_from": str(file), "adapter": "lora", "checkpoint_every": 2}
    run(tmp_path / "run", **options, stop_after=2)
    weights["norm.weight"] += 1
    save_file(weights, file)
    with pytest.raises(InputError, match="stands on other weights"):
        run(tmp_path / "run", **options, resume=True)


def test_another_number_of_classes_gets_a_new_classifier(base, tmp_path):
    weights = load_file(base / "model.safetensors")
    weights |= {name: torch.zeros(7, *weights[name].shape[1:]) for name in ("head.weight", "head.bias")}
    save_file(weights, tmp_path / "seven.safetensors")
    recipe = prepare(TrainConfig(arch="test_vit", img_size=32, init_from=str(tmp_path / "seven.safetensors")))
    assert recipe.new == ("head.weight", "head.bias")
    assert torch.equal(recipe.model.norm.weight, weights["norm.weight"])
    assert recipe.model.head.weight.std() > 0


def test_text_models_take_adapters(tmp_path):
    options = {"arch": "lean_lm", "img_size": None, "seq_len": 64, "batch_size": 2, "val_windows": 2, "max_steps": 2}
    summary = run(tmp_path, **options, adapter="sparse:target=mlp")
    assert summary["trainable_params"] < 0.05 * summary["params"]


FAULTS = [
    ({"adapter": "sprase"}, "adapter 'sprase' does not exist; bias, "),
    ({"adapter": "sparse:density"}, "has 'density' for an option; sparse:target=mlp would be one"),
    ({"adapter": "sparse:density=3"}, "density 3 must be a share above 0"),
    ({"adapter": "sparse:densty=0.1"}, "option 'densty' is not one of adapter 'sparse'"),
    ({"adapter": "lora:target=xyz"}, "target 'xyz' matches no layer"),
    ({"init_from": "nowhere"}, "init_from 'nowhere' is no safetensors file or run"),
    ({"init_from": "nowhere", "pretrained": True}, "cannot be given beside --pretrained"),
    ({"pretrained": True}, "pretrained weights of arch test_vit cannot be had here"),
    ({"arch": "lean_lm", "img_size": None, "pretrained": True}, "pretrained True means nothing to data 'text'"),
]


@pytest.mark.parametrize(("options", "message"), FAULTS)
def test_faults_are_one_sentence(tmp_path, monkeypatch, options, message):
    def unreachable(*args, **kwargs):
        raise FileNotFoundError("no network")

    if options == {"pretrained": True}:
        monkeypatch.setattr("timm.models._builder.load_pretrained", unreachable)
    with pytest.raises(InputError, match=message):
        run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_fit_are_named(base, tmp_path):
    weights = load_file(base / "model.safetensors")
    cases = {
        "lacks norm.bias": {name: t for name, t in weights.items() if name != "norm.bias"},
        "has norm.bias as (3,), but arch test_vit has it as": weights | {"norm.bias": torch.zeros(3)},
        "has other as (3,), but arch test_vit has no such weight": weights | {"other": torch.zeros(3)},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        file = tmp_path / f"{number}.safetensors"
        save_file(tensors, file)
        with pytest.raises(InputError) as error:
            run(tmp_path / "run", init_from=str(file))
        assert message in str(error.value)


def test_options_after_the_colon():
    method, options = parse_adapter("sparse:density=0.02,structure=2:4,target=.*attn.*,rank=3")
    assert method == "sparse"
    assert options == {"density": 0.02, "structure": "2:4", "target": ".*attn.*", "rank": 3}
