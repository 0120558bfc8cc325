"""Files on disk: whole or not there, and a state that comes back to the bit."""

import os
import random

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from lean_arch.training import state
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.optim import make_optimizer


def trained(optimizer="adamw", steps=2, seed=0):
    torch.manual_seed(seed)
    model = timm.create_model("test_vit", num_classes=3, img_size=32)
    optimizer = make_optimizer(TrainConfig(optimizer=optimizer), model)
    for _ in range(steps):
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def draws():
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "adafactorbv", "muon"])
def test_a_checkpoint_brings_everything_back(tmp_path, name):
    accelerator = Accelerator()
    model, optimizer = trained(name)
    for group in optimizer.param_groups:
        group["lr"] = 0.012345
    np.random.randn()  # leaves a second Gaussian in waiting
    state.save_checkpoint(tmp_path, 12, model, optimizer, accelerator, {"note": 3})
    want = draws()

    other, fresh = trained(name, steps=0, seed=1)
    found = state.checkpoints(tmp_path)
    assert [folder.name for folder in found] == ["step_000012"]
    facts = state.read_facts(found[0])
    assert (facts["step"], facts["note"]) == (12, 3)
    state.load_checkpoint(found[0], facts, other, fresh, accelerator)
    assert draws() == want
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[before].keys() == fresh.state[after].keys()
        for key, value in optimizer.state[before].items():
            again = fresh.state[after][key]
            assert type(value) is type(again)
            if torch.is_tensor(value):
                assert value.dtype == again.dtype
                assert torch.equal(value, again), key
            else:
                assert value == again, key
    for a, b in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}


def test_the_last_two_checkpoints_are_kept(tmp_path):
    model, optimizer = trained(steps=1)
    for step in (1, 2, 3, 3):
        state.save_checkpoint(tmp_path, step, model, optimizer, Accelerator(), {})
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000002", "step_000003"]


def test_a_checkpoint_that_breaks_off_is_not_there(tmp_path, monkeypatch):
    model, optimizer = trained(steps=1)
    state.save_checkpoint(tmp_path, 1, model, optimizer, Accelerator(), {})
    monkeypatch.setattr(state, "write_json", lambda path, value: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        state.save_checkpoint(tmp_path, 2, model, optimizer, Accelerator(), {})
    assert [folder.name for folder in state.checkpoints(tmp_path)] == ["step_000001"]


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    state.write_whole(path, "before")
    monkeypatch.setattr(os, "fsync", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        state.write_whole(path, "after")
    assert path.read_text() == "before"


def test_tied_weights_are_written(tmp_path):
    layer = torch.nn.Linear(3, 3)
    tied = torch.nn.ModuleDict({"a": layer, "b": layer})
    state.write_tensors(tmp_path / "model.safetensors", tied.state_dict())
    assert torch.equal(load_file(tmp_path / "model.safetensors")["b.weight"], layer.weight)


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.csv"
    with state.Metrics(path, 0) as metrics:
        for step in (1, 2, 3):
            metrics.add(step, 0.1 * step, 1e-3, 5.0, 100, 8)
    with state.Metrics(path, 2) as metrics:
        metrics.add(3, 7.0, 1e-3, 5.0, 100, 8)
    lines = path.read_text().splitlines()
    assert lines[0] == "step,loss,lr,samples_per_s,peak_bytes,micro_batch_size"
    assert [line.split(",")[:2] for line in lines[1:]] == [["1", "0.1"], ["2", "0.2"], ["3", "7.0"]]


def test_folders_are_numbered_and_never_shared(tmp_path):
    base = tmp_path / "vit"
    assert state.free_folder(None, base, "mark") == base
    for name in ("vit", "vit-2", "vit-10", "vit-tiny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mark").touch()
    assert state.free_folder(None, base, "mark") == tmp_path / "vit-11"
    assert state.taken_folders(base, "mark")[-1] == tmp_path / "vit-10"
    with pytest.raises(InputError, match=r"vit-2.*--resume"):
        state.free_folder(str(tmp_path / "vit-2"), base, "mark")
    (tmp_path / "empty").mkdir()
    assert state.free_folder(str(tmp_path / "empty"), base, "mark") == tmp_path / "empty"
    (tmp_path / "file").touch()
    for place in ("file", "file/inside"):
        with pytest.raises(InputError, match=f"{place}.* is a file"):
            state.free_folder(str(tmp_path / place), base, "mark")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "short", "foreign"])
def test_a_damaged_checkpoint_is_named(tmp_path, name, damage):
    accelerator = Accelerator()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state.save_checkpoint(tmp_path, 4, model, optimizer, accelerator, {"config": {}})
    (checkpoint,) = state.checkpoints(tmp_path)
    file = checkpoint / name
    content = {"missing": None, "short": file.read_bytes()[:-9], "foreign": b"{}"}[damage]
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(state.Damaged, match=r"resume cannot read .*step_000004"):
        state.load_checkpoint(checkpoint, state.read_facts(checkpoint), model, optimizer, accelerator)


def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path):
    path = tmp_path / "summary.json"
    state.write_json(path, {"step": 1})

    def fail():
        with state.whole(path) as part:
            part.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert state.read_json(path) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_place_is_refused_by_name(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="read-only"):
        state.named_folder(str(tmp_path / "run"))
