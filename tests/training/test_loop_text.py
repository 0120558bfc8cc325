"""The loop on sequences: the same promises as on images, with targets that do not count everywhere."""

import csv
import json

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from lean_arch import cli
from lean_arch.models.lean_lm import LeanLM
from lean_arch.registry import SEQUENCE_MODELS
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.loop import train

SENTENCE = b"the quick brown fox jumps over the lazy dog; "


class Masked(LeanLM):
    objective = "masked"


def tiny(kind):
    def build(**options):
        return kind(**{"dim": 32, "depth": 2, "global_every": 2, "window": 8, "num_heads": 2, "seq_len": 24} | options)

    return build


@pytest.fixture(autouse=True)
def archs(monkeypatch):
    for name, kind in (("tiny_causal", LeanLM), ("tiny_masked", Masked)):
        monkeypatch.setitem(SEQUENCE_MODELS.things, name, tiny(kind))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(SENTENCE * 300)
    return f"text:{tmp_path / 'text'}"


def run(folder, **options):
    defaults = {"arch": "tiny_causal", "batch_size": 6, "max_steps": 4, "precision": "fp32", "val_windows": 9}
    return train(TrainConfig(**defaults | {"output": str(folder)} | options), Console(quiet=True))


def losses(folder):
    with open(folder / "metrics.csv") as file:
        return [row["loss"] for row in csv.DictReader(file)]


def test_a_run_leaves_its_files(tmp_path, text):
    summary = run(tmp_path / "run", data=text, micro_batch_size=4)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert (summary["seq_len"], summary["data"], summary["accumulation_steps"]) == (24, text, 2)
    assert sum(summary["memory"].values()) == summary["peak_bytes"]
    recipe = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (recipe["data"], recipe["label_smoothing"]) == (text, 0.0)


@pytest.mark.parametrize("arch", ["tiny_causal", "tiny_masked"])
def test_it_learns_a_sentence(tmp_path, text, arch):
    summary = run(tmp_path / "run", arch=arch, data=text, max_steps=100, batch_size=16, lr=1e-2)
    first = float(losses(tmp_path / "run")[0])
    assert 4.5 < first < 6.5
    assert summary["val_loss"] < 0.6 * first
    assert summary["val_accuracy"] > 0.1


@pytest.mark.parametrize("arch", ["tiny_causal", "tiny_masked"])
def test_micro_batches_leave_the_curve_as_it_is(tmp_path, text, arch):
    """Masked windows have targets in different numbers, so a mean of means would not do."""
    for name, size in (("whole", 6), ("parts", 4)):
        run(tmp_path / name, arch=arch, data=text, micro_batch_size=size, optimizer="sgd", lr=0.3)
    whole = [float(loss) for loss in losses(tmp_path / "whole")]
    assert [float(loss) for loss in losses(tmp_path / "parts")] == pytest.approx(whole, rel=1e-6)
    assert len(set(whole)) == 4


def test_the_loss_is_the_mean_over_the_targets(tmp_path, text):
    config = TrainConfig(arch="tiny_masked", data=text, batch_size=6, max_steps=1, seed=3, output=str(tmp_path / "run"))
    train(config, Console(quiet=True))
    from lean_arch.training.data import Batches
    from lean_arch.training.step import build_sequence_model
    from lean_arch.training.text import open_text

    config = config.settled()
    model = build_sequence_model(config)
    data = open_text(config, 24, "masked")
    tokens, targets = data.train[next(iter(Batches(len(data.train), 6, seed=3)))]
    counts = (targets != -100).sum(1)
    assert len(set(counts.tolist())) > 1
    want = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).double(), targets.flatten())
    assert float(losses(tmp_path / "run")[0]) == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("arch", ["tiny_causal", "tiny_masked"])
def test_resuming_goes_on_to_the_bit(tmp_path, text, arch):
    # 50 windows an epoch: interrupted inside the second, with dropout drawing random numbers
    options = {"arch": arch, "data": text, "batch_size": 100, "max_steps": 9, "drop_rate": 0.2, "seed": 4}
    run(tmp_path / "straight", **options)
    run(tmp_path / "parts", **options, stop_after=7)
    run(tmp_path / "parts", **options, resume=True, workers=1)
    assert losses(tmp_path / "straight") == losses(tmp_path / "parts")
    straight, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "parts"))
    assert all(torch.equal(straight[name], parts[name]) for name in straight)


def test_resuming_with_another_text_of_the_same_length_is_refused(tmp_path, text):
    run(tmp_path / "run", data=text, stop_after=2)
    before = (tmp_path / "run" / "metrics.csv").read_text()
    (tmp_path / "text" / "a.txt").write_bytes(SENTENCE * 299 + SENTENCE.upper())
    with pytest.raises(InputError, match=r"holds another text than when .*step_000002 was written; put that one back"):
        run(tmp_path / "run", data=text, resume=True)
    assert (tmp_path / "run" / "metrics.csv").read_text() == before
    (tmp_path / "text" / "a.txt").write_bytes(SENTENCE * 300)
    assert run(tmp_path / "run", data=text, resume=True)["steps"] == 4


@pytest.mark.parametrize(("asked", "said"), [(10**6, True), (9, False)])
def test_fewer_windows_to_validate_on_than_asked_for_are_said(tmp_path, text, capsys, asked, said):
    config = TrainConfig(arch="tiny_causal", data=text, max_steps=1, val_windows=asked, output=str(tmp_path / "run"))
    train(config, Console(width=300))
    words = "val_windows 1000000 is more than the text holds: validation takes all its 56"
    assert (words in capsys.readouterr().out) == said


def test_validation_and_checkpoints_come_between(tmp_path, text):
    run(tmp_path / "run", data=text, max_steps=5, validate_every=2)
    names = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step_000004", "step_000005"]


def test_seq_len_goes_to_the_model_and_the_windows(tmp_path, text):
    assert run(tmp_path / "run", data=text, seq_len=40, max_steps=1)["seq_len"] == 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "lean_vit", "data": "text"}, "data 'text' does not suit arch lean_vit, which takes images"),
        ({"data": "digits"}, "data 'digits' does not suit arch tiny_causal, which takes sequences"),
        ({"arch": "lean_ml", "data": "text"}, "arch 'lean_ml' does not exist; nearest: lean_lm"),
        ({"img_size": 32}, "img_size 32 means nothing to data 'text'"),
        ({"arch": "lean_vit", "seq_len": 9, "val_windows": None}, "seq_len 9 means nothing to data 'digits'"),
        ({"drop_path_rate": 0.1}, "drop_path_rate 0.1 is not something that arch tiny_causal takes"),
        ({"seq_len": 10**6}, "seq_len 1000000 is too long"),
        ({"batch_size": 10**9}, "training sequences"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path, options, words):
    with pytest.raises(InputError, match=words):
        run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_missing_text_ends_in_2(tmp_path, capsys):
    assert cli.train(["--arch", "lean_lm", "--data", f"text:{tmp_path / 'nowhere'}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "nowhere" in said


def test_the_plan_shows_sequences(tmp_path, text, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "--arch", "tiny_causal", "--data", text, "--batch_size", "4", "--max_steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "at 24 bytes" in said
    assert "4 sequences a step" in said
