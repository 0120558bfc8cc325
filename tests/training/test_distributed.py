"""Two processes of a launch train one model: the numbers of one process, and one folder."""

import csv
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def losses(folder):
    with open(folder / "metrics.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_two_processes_give_the_numbers_of_one(tmp_path):
    options = ["--arch", "test_vit", "--batch_size", "13", "--micro_batch_size", "4", "--max_steps", "4"]
    for number, launch in enumerate(([sys.executable], LAUNCH), start=1):
        command = [*launch, "train.py", *options, "--precision", "fp32", "--output", str(tmp_path / str(number))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("validation accuracy") == 1
    one, two = (json.loads((tmp_path / folder / "summary.json").read_text()) for folder in "12")
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)
    assert (one["accumulation_steps"], two["accumulation_steps"]) == (4, 2)
