"""The recipe: what it refuses, and that it survives YAML and the command line."""

import re

import pytest

from lean_arch.cli import parse
from lean_arch.training.config import InputError, TrainConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": None}, ["arch", "--arch lean_vit"]),
        ({"compare": ["a", "b"]}, ["arch", "--compare"]),
        ({"arch": None, "compare": ["a"]}, ["compare", "two"]),
        ({"data": "texts"}, ["data", "texts", "digits", "text:PATH", "folder:PATH", "timm:NAME"]),
        ({"data": "text:no/such/place"}, ["data", "no/such/place"]),
        ({"seq_len": 0}, ["seq_len", "0"]),
        ({"data": "folder:no/such/place"}, ["data", "no/such/place"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"batch_size": -4}, ["batch_size", "-4"]),
        ({"max_steps": -1}, ["max_steps", "-1"]),
        ({"micro_batch_size": 33}, ["micro_batch_size", "33", "32"]),
        ({"micro_batch_size": "some"}, ["micro_batch_size", "some", "auto"]),
        ({"precision": "fp17"}, ["precision", "fp17", "bf16"]),
        ({"checkpoint": "most"}, ["checkpoint", "most", "sqrt"]),
        ({"checkpoint": 0}, ["checkpoint", "0"]),
        ({"lr": float("nan")}, ["lr", "nan"]),
        ({"lr": 1e-6}, ["min_lr", "lr"]),
        ({"drop_rate": 1.0}, ["drop_rate", "1.0"]),
        ({"workers": -1}, ["workers", "-1"]),
        ({"budget": ""}, ["budget", "''", "4GiB"]),
        ({"prefetch": 2}, ["prefetch", "--workers"]),
    ],
)
def test_an_impossible_value_is_refused_by_name(options, words):
    with pytest.raises(InputError) as raised:
        TrainConfig(**{"arch": "lean_vit"} | options).check()
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_default_passes():
    TrainConfig(arch="lean_vit").check()


def test_yaml_gives_the_recipe_back(tmp_path):
    config = TrainConfig(arch="lean_vit", batch_size=12, checkpoint=3, drop_rate=0.1, pin_memory=False, max_steps=7)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert parse(["--config", str(tmp_path / "config.yaml")]) == config
    # what belongs to one invocation is not part of a recipe
    assert not re.search("output|resume|dry_run", TrainConfig(arch="a", resume=True, output="x").to_yaml())


def test_arguments_give_the_recipe_back():
    config = TrainConfig(
        arch="lean_vit", micro_batch_size=8, checkpoint="sqrt", budget="1GiB", clip_grad=0.0, workers=0
    )
    assert parse(config.to_arguments()) == config
