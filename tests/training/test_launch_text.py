"""Two processes share a batch whose halves hold different numbers of targets: the numbers of one process."""

import csv
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from lean_arch.models.lean_lm import LeanLM
from lean_arch.registry import SEQUENCE_MODELS
from lean_arch.cli import train

@SEQUENCE_MODELS.register("tiny_masked")
class Masked(LeanLM):
    objective = "masked"
    def __init__(self, **options):
        super().__init__(**{"dim": 32, "depth": 2, "window": 8, "num_heads": 2, "seq_len": 24} | options)

sys.exit(train(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog; " * 300)
    options = [
        "--arch",
        "tiny_masked",
        "--data",
        f"text:{tmp_path / 'text.txt'}",
        "--batch_size",
        "7",
        "--max_steps",
        "4",
    ]
    options += [
        "--micro_batch_size",
        "2",
        "--precision",
        "fp32",
        "--optimizer",
        "sgd",
        "--lr",
        "0.3",
        "--val_windows",
        "9",
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    losses = []
    for name, start in (("one", []), ("two", launch)):
        command = [sys.executable, *start, "program.py", *options, "--output", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        with open(tmp_path / name / "metrics.csv") as file:
            losses.append([float(row["loss"]) for row in csv.DictReader(file)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len(set(losses[0])) == 4
