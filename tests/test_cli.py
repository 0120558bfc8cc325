"""The commands, as a user types them."""

import csv
import pathlib
import subprocess
import sys

import pytest

import lean_arch
from lean_arch import cli
from lean_arch.training.config import InputError, TrainConfig

ROOT = pathlib.Path(lean_arch.__file__).parent.parent
SMALL = ["--img_size", "32", "--batch_size", "8", "--max_steps", "2", "--precision", "fp32"]


def test_hyphens_and_underscores_are_the_same():
    got = cli.parse(["--arch", "a-b", "--batch-size=3", "--max-steps", "-2", "--dry-run", "--pin-memory", "false"])
    assert got == TrainConfig(arch="a-b", batch_size=3, max_steps=-2, dry_run=True, pin_memory=False)


def test_the_command_line_goes_before_the_file(tmp_path):
    (tmp_path / "recipe.yaml").write_text("arch: lean_vit\nlr: 0.5\nbatch_size: 7\n")
    got = cli.parse(["--config", str(tmp_path / "recipe.yaml"), "--lr", "0.25"])
    assert got == TrainConfig(arch="lean_vit", lr=0.25, batch_size=7)


def test_compare_takes_names():
    assert cli.parse(["--compare", "a", "b", "--seed", "1"]) == TrainConfig(compare=["a", "b"], seed=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch_size", "many"], ["batch_size", "'many'", "whole number"]),
        (["--lr", "fast"], ["lr", "'fast'", "number"]),
        (["--batchsize", "3"], ["batchsize", "batch_size"]),
        (["--resume", "yes"], ["yes"]),
        (["--epochs"], ["epochs"]),
        (["--config", "no/such.yaml"], ["config", "no/such.yaml"]),
    ],
)
def test_what_does_not_parse_is_named(arguments, words):
    with pytest.raises(InputError) as raised:
        cli.parse(arguments)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arch: [1\nlr: }", ["config"]),
        ("- 1\n", ["config"]),
        ("learning: 3\n", ["learning"]),
        ("batch_size: lots\n", ["batch_size", "lots"]),
    ],
)
def test_a_corrupt_config_is_one_sentence(tmp_path, text, words, capsys):
    (tmp_path / "bad.yaml").write_text(text)
    assert cli.train(["--arch", "test_vit", "--config", str(tmp_path / "bad.yaml")]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    for word in words:
        assert word in said


def test_bad_input_ends_in_2_without_a_traceback(tmp_path):
    command = [sys.executable, "train.py", "--arch", "lean_vot", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "lean_vot" in done.stderr
    assert "lean_vit" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_list_shows_the_zoo(capsys):
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.split() == lean_arch.list_models()
    assert cli.main(["list", "no_*"]) == 2
    assert cli.main(["fly"]) == 2
    assert cli.main([]) == 0


def test_plan_and_dry_run_write_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--arch", "test_vit", "--checkpoint", "all", *SMALL]
    assert cli.main(["plan", *arguments]) == 0
    assert cli.train([*arguments, "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert said.count("activations") == 2
    assert "without lean parts" in said
    assert list(tmp_path.iterdir()) == []


def test_train_twice_keeps_both_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert cli.main(["train", "--arch", "test_vit", *SMALL]) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["test_vit", "test_vit-2"]


def test_compare_writes_a_row_an_arch(tmp_path):
    archs = ["test_vit", "test_resnet"]
    command = [sys.executable, "-m", "lean_arch.cli", "compare", *archs, *SMALL, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "comparison.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["arch"] for row in rows] == archs
    for row in rows:
        parts = [row[name] for name in ("weights", "gradients", "optimizer", "activations", "other")]
        assert sum(map(int, parts)) == int(row["peak_bytes"])
        change = int(row["peak_bytes"]) / int(rows[0]["peak_bytes"]) - 1
        assert float(row["peak_change"]) == pytest.approx(change)
    assert all(arch in done.stdout and arch in (tmp_path / "comparison.md").read_text() for arch in archs)
    assert (tmp_path / "comparison.png").read_bytes()[:4] == b"\x89PNG"


def test_compare_refuses_an_unknown_arch_before_it_trains(tmp_path, capsys):
    assert cli.train(["--compare", "test_vit", "test_vot", "--output", str(tmp_path / "out")]) == 2
    assert "test_vot" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_recipe_parses_and_opens_with_its_command():
    recipes = sorted((ROOT / "configs").glob("*.yaml"))
    assert recipes
    for path in recipes:
        assert path.read_text().startswith(f"# python train.py --config configs/{path.name}")
        cli.parse(["--config", str(path)]).check()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xda\xff\x00", ["config", "YAML"]),
        (b"arch: lean_vit\noptimizer:\n", ["optimizer has no value", "adamw"]),
        (b"arch: lean_vit\nseed: 4294967296\n", ["seed 4294967296", "below"]),
    ],
)
def test_a_corrupt_recipe_is_one_sentence(tmp_path, capsys, content, words):
    (tmp_path / "recipe.yaml").write_bytes(content)
    assert cli.train(["--config", str(tmp_path / "recipe.yaml")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in words)


def test_a_disk_that_takes_no_more_is_one_sentence(monkeypatch, capsys):
    def full(config):
        raise OSError(28, "No space left on device", "runs/x/model.safetensors")

    monkeypatch.setattr(cli, "run_training", full)
    assert cli.train(["--arch", "lean_vit"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "No space left on device" in said
    assert "--resume" in said
