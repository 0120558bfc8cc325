"""The loop: what it writes, that it learns, and that an interruption leaves no trace in the numbers."""

import csv
import json

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.loop import train
from lean_arch.training.recipe import choose_precision

CATEGORIES = {"weights", "gradients", "optimizer", "activations", "other"}


def run(folder, **options):
    defaults = {"arch": "test_vit", "img_size": 32, "batch_size": 16, "max_steps": 4, "precision": "fp32"}
    options = defaults | {"output": str(folder)} | options
    return train(TrainConfig(**options), Console(quiet=True))


def rows(folder):
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


def losses(folder):
    return [row["loss"] for row in rows(folder)]


def test_a_run_leaves_its_files(tmp_path):
    summary = run(tmp_path, micro_batch_size=6, drop_path_rate=0.1)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["steps"] == 4
    assert (summary["micro_batch_size"], summary["accumulation_steps"]) == (6, 3)
    assert set(summary["memory"]) == CATEGORIES
    assert sum(summary["memory"].values()) == summary["peak_bytes"]
    assert abs(summary["predicted_peak_bytes"] / summary["peak_bytes"] - 1) < 0.03
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]
    assert int(rows(tmp_path)[-1]["peak_bytes"]) == summary["peak_bytes"]
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["micro_batch_size"] == 6
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(t.numel() for name, t in weights.items()) == summary["params"]
    assert sorted(f.name for f in tmp_path.iterdir() if f.name.startswith(".")) == []


def test_it_learns_the_digits(tmp_path):
    summary = run(tmp_path, batch_size=32, max_steps=None, epochs=4, lr=2e-3)
    assert summary["val_accuracy"] > 0.6
    assert summary["steps"] == 4 * (1434 // 32)


@pytest.mark.slow
def test_a_net_of_depthwise_convolutions_learns_the_digits(tmp_path):
    summary = run(tmp_path, arch="lean_mobilenetv3_small", img_size=None, batch_size=32, max_steps=None, epochs=8)
    assert summary["val_accuracy"] > 0.95
    assert abs(summary["predicted_peak_bytes"] / summary["peak_bytes"] - 1) < 0.02


def test_micro_batches_leave_the_curve_as_it_is(tmp_path):
    for name, size in (("whole", 16), ("parts", 5)):
        run(tmp_path / name, micro_batch_size=size, drop_rate=0.0, drop_path_rate=0.0)
    for a, b in zip(losses(tmp_path / "whole"), losses(tmp_path / "parts"), strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-5)


def test_the_seed_settles_the_curve(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path / name, seed=seed, drop_rate=0.1)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


@pytest.mark.parametrize("arch", ["test_vit", "test_efficientnet"])  # the second has BatchNorm
def test_resuming_goes_on_to_the_bit(tmp_path, arch):
    # 5 steps an epoch: interrupted inside the second, with dropout drawing random numbers
    options = {"arch": arch, "batch_size": 280, "max_steps": 9, "drop_rate": 0.2, "checkpoint_every": 3, "seed": 4}
    run(tmp_path / "straight", **options)
    run(tmp_path / "parts", **options, stop_after=7)
    assert len(losses(tmp_path / "parts")) == 7
    run(tmp_path / "parts", **options, resume=True)
    assert losses(tmp_path / "straight") == losses(tmp_path / "parts")
    straight, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "parts"))
    assert all(torch.equal(straight[name], parts[name]) for name in straight)


def test_resuming_repeats_what_came_after_the_checkpoint(tmp_path):
    run(tmp_path / "straight", max_steps=6, checkpoint_every=2)
    run(tmp_path / "parts", max_steps=6, checkpoint_every=2, stop_after=5)
    newest = tmp_path / "parts" / "checkpoints" / "step_000005"
    newest.rename(tmp_path / "lost")  # as if killed between the checkpoints
    run(tmp_path / "parts", max_steps=6, resume=True)
    assert losses(tmp_path / "straight") == losses(tmp_path / "parts")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, capsys, name):
    run(tmp_path / "straight", max_steps=6, drop_rate=0.1)
    run(tmp_path / "parts", max_steps=6, drop_rate=0.1, checkpoint_every=2, stop_after=4)
    for step, last in ((4, False), (2, True)):
        file = tmp_path / "parts" / "checkpoints" / f"step_00000{step}" / name
        content = file.read_bytes()
        file.write_bytes(content[:-9])
        if last:
            with pytest.raises(InputError, match=r"cannot read .*step_000002.* there is none before it"):
                run(tmp_path / "parts", max_steps=6, drop_rate=0.1, resume=True)
            file.write_bytes(content)
    capsys.readouterr()
    run(tmp_path / "parts", max_steps=6, drop_rate=0.1, resume=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "step_000004" in said
    assert said.endswith("goes on from step_000002, the one before\n")
    assert losses(tmp_path / "straight") == losses(tmp_path / "parts")


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 8}, {"arch": "test_resnet"}, {"max_steps": 9}])
def test_resuming_with_another_recipe_is_refused(tmp_path, change):
    run(tmp_path, stop_after=1)
    before = (tmp_path / "metrics.csv").read_text()
    name, value = next(iter(change.items()))
    with pytest.raises(InputError, match=f"{name} {value} "):
        run(tmp_path, resume=True, **change)
    assert (tmp_path / "metrics.csv").read_text() == before


def test_resuming_where_nothing_is_starts_anew(tmp_path, capsys):
    console = Console(width=200)
    train(TrainConfig(arch="test_vit", img_size=32, max_steps=1, output=str(tmp_path), resume=True), console)
    assert "anew" in capsys.readouterr().out
    assert len(losses(tmp_path)) == 1


def test_resuming_in_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file' cannot be a folder"):
        run(tmp_path / "file", resume=True)


def test_a_complete_run_is_left_alone(tmp_path):
    summary = run(tmp_path, max_steps=2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run(tmp_path, max_steps=2, resume=True) == summary
    with pytest.raises(InputError, match="already holds a run"):
        run(tmp_path, max_steps=2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "test_vot"}, "test_vot"),
        ({"arch": "vit_tiny_patch16_224", "img_size": 40}, "img_size 40"),
        ({"batch_size": 5000}, "batch_size 5000"),
        ({"optimizer": "adamx"}, "adamx"),
        ({"precision": "fp16"}, "fp16"),
        ({"checkpoint": 999}, "checkpoint policy 999"),
        ({"budget": "3 elephants"}, "3 elephants"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, options, words):
    if options.get("precision") == "fp16" and torch.cuda.is_available():
        pytest.skip("a GPU can do fp16")
    with pytest.raises(InputError, match=words):
        run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_diverged_run_ends_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match=r"lr 1e\+30.*smaller"):
        run(tmp_path, lr=1e30, optimizer="sgd", clip_grad=0.0, warmup=0.0, max_steps=9)


def test_bf16_runs_and_checkpointing_changes_no_number(tmp_path):
    for policy in ("none", "all"):
        run(tmp_path / policy, precision="bf16", checkpoint=policy, max_steps=2, batch_size=4, drop_rate=0.1)
    assert losses(tmp_path / "none") == losses(tmp_path / "all")


def test_precision_is_what_the_device_does_fast(monkeypatch):
    cpu = torch.device("cpu")
    for native, fast in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert choose_precision("auto", cpu) == fast
        assert choose_precision("bf16", cpu) == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert choose_precision("auto", torch.device("cuda")) == "fp16"
    with pytest.raises(InputError, match="bf16"):
        choose_precision("bf16", torch.device("cuda"))
