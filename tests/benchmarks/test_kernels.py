"""The builds of all kernels, without a GPU: a few of them whole, and what is said of faults."""

import importlib
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from benchmarks import kernels
from lean_arch.ops.targets import TARGETS

ROW = {"spill_bytes": 0, "shared_bytes": 100, "shared_limit": 100, "matrix_unit": True}


def number_of(module: str, target: str, name: str, dtype: str) -> int:
    builds = importlib.import_module(module).builds(TARGETS[target])
    return next(i for i, build in enumerate(builds) if (build.name, build.dtype) == (name, dtype))


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_a_kernel_builds_without_its_gpu(target):
    module = "lean_arch.ops.attention.kernels"
    row = kernels.build_row(module, target, number_of(module, target, "attention_dq_d64", "bf16"))
    assert list(row) == list(kernels.COLUMNS)
    assert (row["kernel"], row["target"], row["dtype"]) == ("attention_dq_d64", target, "bf16")
    assert 0 < row["registers"] <= 512
    assert 0 < row["shared_bytes"] <= row["shared_limit"] == TARGETS[target].shared_limit
    assert kernels.faults(row) == []
    assert row["matrix_unit"] is True


@pytest.mark.parametrize("target", TARGETS)
def test_every_module_names_its_builds_once(target):
    for module in kernels.MODULES:
        builds = list(importlib.import_module(module).builds(TARGETS[target]))
        assert len({(build.name, build.dtype) for build in builds}) == len(builds) > 0
        for build in builds:
            assert set(build.fn.arg_names) == set(build.signature) | set(build.constexprs), build.name


@pytest.mark.parametrize(
    ("change", "message"),
    [({"spill_bytes": 8}, "spills 8"), ({"shared_bytes": 101}, "needs 101"), ({"matrix_unit": False}, "no matrix")],
)
def test_faults_are_named(change, message):
    assert kernels.faults(ROW) == kernels.faults(ROW | {"matrix_unit": "not needed"}) == []
    (fault,) = kernels.faults(ROW | change)
    assert message in fault


def test_timing_without_a_gpu_says_what_is_missing():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "benchmarks.kernels"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr
    assert done.stderr.count("\n") == 1
