"""Adapters on disk: what is loaded computes what was saved, and nothing else is taken for it."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lean_arch import adapters
from lean_arch.adapters.packing import pack_index, unpack_index


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2), nn.Linear(36, 16), nn.Linear(16, 4)
    )


@torch.no_grad()
def disturb(model):
    for parameter in adapters.trainable_parameters(model):
        parameter += 0.1 * torch.randn_like(parameter)


CASES = [
    ("sparse", {"structure": "unstructured", "density": 0.1}),
    ("sparse", {"structure": "block", "density": 0.3, "rank": 2}),
    ("sparse", {"structure": "column"}),
    ("lora", {"rank": 2, "alpha": 5.0, "rank_stabilized": True}),
    ("bias", {}),
]


@pytest.mark.parametrize(("method", "options"), CASES)
def test_round_trip(tmp_path, method, options):
    model, x = network(), torch.randn(2, 3, 8, 8)
    adapters.attach(model, method, name="task", also_train="5", **options)
    disturb(model)
    model(x)  # moves the running statistics
    model.eval()
    saved = adapters.save(model, "task", tmp_path / "task")
    assert sorted(file.name for file in saved.iterdir()) == ["adapter.json", "adapter.safetensors"]
    other = network()
    adapters.load(other, saved)
    assert torch.equal(other.eval()(x), model(x))
    assert [p.shape for p in adapters.trainable_parameters(other)] == [
        p.shape for p in adapters.trainable_parameters(model)
    ]
    adapters.detach(other, "task")
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), network().state_dict().values()))
    adapters.load(other, saved, name="again")
    assert torch.equal(other(x), model(x))


def test_saving_over_an_adapter_and_beside_other_files(tmp_path):
    model = network()
    adapters.attach(model, "sparse", name="task")
    adapters.save(model, "task", tmp_path / "task")
    disturb(model)
    adapters.save(model, "task", tmp_path / "task")
    assert [file.name for file in tmp_path.iterdir()] == ["task"]
    (tmp_path / "notes").mkdir()
    with pytest.raises(FileExistsError, match="holds no adapter"):
        adapters.save(model, "task", tmp_path / "notes")


def test_a_merged_adapter_is_saved_with_the_hash_of_the_plain_base(tmp_path):
    model = network()
    adapters.attach(model, "sparse", name="task")
    disturb(model)
    adapters.merge(model, "task")
    merged = model[4].weight.clone()
    adapters.save(model, "task", tmp_path / "task")
    assert torch.equal(model[4].weight, merged)
    adapters.load(network(), tmp_path / "task")


def broken(path):
    (path / "adapter.safetensors").write_bytes((path / "adapter.safetensors").read_bytes()[:-7])


def emptied(path):
    (path / "adapter.json").write_text("{}")


def renamed_layer(path):
    text = json.loads((path / "adapter.json").read_text())
    text["layers"] = {f"x{name}": value for name, value in text["layers"].items()}
    (path / "adapter.json").write_text(json.dumps(text))


def unknown_method(path):
    text = json.loads((path / "adapter.json").read_text())
    text["method"] = "nonesuch"
    (path / "adapter.json").write_text(json.dumps(text))


@pytest.mark.parametrize("damage", [broken, emptied, renamed_layer, unknown_method])
def test_damage_is_refused_and_changes_nothing(tmp_path, damage):
    model = network()
    adapters.attach(model, "sparse", name="task")
    path = adapters.save(model, "task", tmp_path / "task")
    damage(path)
    other = network()
    state, classes = other.state_dict(), [type(m) for m in other.modules()]
    with pytest.raises(ValueError, match=r"cannot be read|no layer|does not exist"):
        adapters.load(other, path)
    assert list(other.state_dict()) == list(state)
    assert [type(m) for m in other.modules()] == classes
    assert all(p.requires_grad for p in other.parameters())


def test_another_base_is_refused(tmp_path):
    model = network()
    adapters.attach(model, "sparse", name="task", also_train="5")
    path = adapters.save(model, "task", tmp_path / "task")
    other = network()
    with torch.no_grad():
        other[5].weight += 1  # trained whole, so not part of the base
    adapters.load(other, path)
    adapters.detach(other, "task")
    with torch.no_grad():
        other[4].weight[3, 3] += 1e-6
    with pytest.raises(ValueError, match="for another base than this model"):
        adapters.load(other, path)
    adapters.load(other, path, check_base=False)
    with pytest.raises(ValueError, match="holds no adapter"):
        adapters.load(other, tmp_path)


def test_few_bytes_a_value_at_any_density(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(torch.bfloat16)
    for density in (0.001, 0.01, 0.1, 0.5):
        adapters.attach(model, "sparse", name="task", structure="unstructured", density=density)
        path = adapters.save(model, "task", tmp_path / str(density))
        size = sum(file.stat().st_size for file in path.iterdir())
        assert size <= 4.2 * sum(p.numel() for p in adapters.trainable_parameters(model)) + 700
        adapters.detach(model, "task")


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=200), st.booleans())
def test_packing_is_exact(numbers, ascending):
    index = torch.tensor(sorted(numbers) if ascending else numbers, dtype=torch.int64)
    assert torch.equal(unpack_index(pack_index(index), len(index)), index)
