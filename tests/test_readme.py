"""The README's promises: its commands run, its code runs, its tables are those of the result files."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import render

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(heading: str, language: str = "") -> list[str]:
    """The fenced blocks of one language under a heading."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)


def test_exactly_two_set_up_commands():
    commands = block("Set up")[0].splitlines()
    assert commands == [
        "pip install -e . && python train.py --arch lean_vit",
        'pip install -e ".[test]" && pytest',
    ]


def test_ci_takes_the_test_command_from_here():
    script = (ROOT / ".ci" / "run").read_text()
    find = re.search(r"^commands=\$\((.*)\)$", script, flags=re.MULTILINE)[1]
    found = subprocess.run(["bash", "-c", find], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found == block("Set up")[0]


def test_tables_are_those_of_the_result_files():
    assert render.rendered(README) == README, "run python -m benchmarks.render"


def test_tree_names_what_exists():
    for name in re.findall(r"^ *(\S+)", block("The tree")[0], flags=re.MULTILINE):
        assert (ROOT / name).exists() or (ROOT / "lean_arch" / name).exists(), name


def images(folder: pathlib.Path):
    for split, count in (("train", 20), ("val", 4)):
        for index in range(count):
            place = folder / split / f"class{index % 2}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(index).integers(0, 255, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{index}.png")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_training_command_runs(tmp_path):
    for name in ("train.py", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    images(tmp_path / "images")
    for line in block("Train")[0].splitlines():
        line = line.replace("PATH", "images").replace("--stop_after 40", "--stop_after 1") + " --max_steps 2"
        if "folder:" in line:
            line += " --batch_size 4"
        words = line.split()
        assert words[0] == "python"
        done = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr[-2000:]}"
    for name in ("config.yaml", "metrics.csv", "summary.json", "model.safetensors", "checkpoints"):
        assert (tmp_path / "runs" / "lean_vit" / name).exists(), name


def test_code_runs(tmp_path, monkeypatch):
    """The Python of the README, with what it takes for given."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    part = lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))  # noqa: E731
    images, labels = torch.randn(2, 3, 224, 224), torch.tensor([1, 2])
    names = {
        "torch": torch,
        **{name: part() for name in ("attention_1", "mlp_1", "attention_2", "mlp_2")},
        **{"x": torch.randn(4, 5, 8), "loss": torch.sum, "images": images, "labels": labels},
        **{name: torch.randn(1, 2, 100, 8) for name in "qkv"},
        **{"hidden": torch.randn(6, 8), "vocabulary": torch.randn(50, 8), "target": torch.arange(6)},
        "step": lambda: nn.Linear(3, 3)(torch.ones(3)).sum().backward(),
    }
    for code in block("Import a block into your model", "python"):
        exec(code, names)
    assert names["mlp_2"][1].weight.grad is not None
