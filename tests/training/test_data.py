"""Data: the same bits for the same (seed, epoch, index), whatever else differs."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits

from lean_arch.models import create_model
from lean_arch.training.compare import at_one_size
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import DIGITS_MEAN, DIGITS_STD, Batches, Digits, loader, open_data


def folder_of_images(root, parts=("train", "val"), classes=("ant", "bee"), count=3):
    draw = np.random.default_rng(0)
    for part in parts:
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(draw.integers(0, 255, (40, 50, 3), dtype=np.uint8))
                image.save(root / part / name / f"{number}.png")
    return TrainConfig(arch="test_vit", data=f"folder:{root}", img_size=32, workers=0)


def test_digits_are_split_once_and_for_all():
    train, val = Digits(16, True, seed=0), Digits(16, False, seed=9)
    assert len(train) + len(val) == 1797
    assert 355 < len(val) < 370
    assert torch.bincount(val.labels).min() >= 34
    assert torch.equal(Digits(16, False, seed=1).labels, val.labels)
    scans = {scan.numpy().tobytes() for scan in train.scans}
    assert not any(scan.numpy().tobytes() in scans for scan in val.scans)


def test_validation_digits_are_the_scans_enlarged():
    val = Digits(32, False, seed=0)
    images, labels = val[0, [0, 5]]
    scans = torch.from_numpy(load_digits().images).float()[:, None] / 16
    at = int((scans == val.scans[5]).flatten(1).all(1).nonzero()[0, 0])
    want = F.interpolate(F.pad(scans[at : at + 1], (4, 4, 4, 4)), scale_factor=4, mode="bicubic")[..., 16:48, 16:48]
    torch.testing.assert_close(images[1:], (want - DIGITS_MEAN) / DIGITS_STD, atol=1e-4, rtol=1e-4)
    assert labels[1] == load_digits().target[at]


@pytest.mark.parametrize(
    ("arch", "side"),
    [("lean_vit", 32), ("vit_small_patch14_dinov2", 42), ("lean_mobilenetv3_small", 64), ("lean_revnet", 64)],
)
def test_digits_leave_the_last_map_more_than_a_pixel(arch, side):
    data = open_data(TrainConfig(arch=arch).settled())
    assert data.img_size == data.train[0, [3]][0].shape[-1] == side
    if side == 64:
        maps = create_model(arch, in_chans=1).eval().forward_features(data.sample(1)[0].zero_())
        assert maps.shape[-2:] == (2, 2)
    assert open_data(TrainConfig(arch=arch, img_size=28).settled()).img_size == 28


@pytest.mark.parametrize(
    ("options", "side"),
    [
        ({}, 64),
        ({"img_size": 96}, 96),
        ({"data": "timm:torch/cifar10"}, None),
        ({"compare": ["lean_vit", "lean_lm"]}, None),
    ],
)
def test_a_comparison_has_one_size_of_digits(options, side):
    config = TrainConfig(**{"compare": ["lean_vit", "test_resnet"]} | options)
    assert at_one_size(config).img_size == side


def test_a_training_digit_depends_on_seed_epoch_and_index_alone():
    data = Digits(24, True, seed=3)
    together, _ = data[2, [7, 100, 9]]
    alone, _ = data[2, [100]]
    assert torch.equal(together[1:2], alone)
    assert torch.equal(data[2, [100]][0], alone)
    for other in (Digits(24, True, seed=4)[2, [100]], data[3, [100]]):
        assert not torch.equal(other[0], alone)


def test_loading_leaves_the_random_streams_alone(tmp_path):
    for config in (TrainConfig(arch="test_vit").settled(), folder_of_images(tmp_path)):
        data = open_data(config)
        before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
        list(loader(data.train, Batches(len(data.train), 3, seed=0), config))
        assert random.getstate() == before[0]
        assert (np.random.get_state()[1] == before[1]).all()
        assert torch.equal(torch.get_rng_state(), before[2])


def test_workers_give_the_same_bits(tmp_path):
    config = folder_of_images(tmp_path)
    runs = []
    for workers in (0, 2):
        config.workers = workers
        data = open_data(config)
        batches = Batches(len(data.train), 2, seed=1)
        loading = loader(data.train, batches, config)
        runs.append([batch for batches.epoch in (0, 1) for batch in loading])
    assert len(runs[0]) == 6
    for (images, labels), (same, too) in zip(*runs, strict=True):
        assert torch.equal(images, same)
        assert torch.equal(labels, too)
    assert not torch.equal(runs[0][0][0], runs[0][3][0])


def test_a_folder_gives_its_classes_and_images(tmp_path):
    data = open_data(folder_of_images(tmp_path))
    assert (data.num_classes, data.in_chans, data.img_size) == (2, 3, 32)
    images, labels = data.val[0, [0, 5]]
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [0, 1]


@pytest.mark.parametrize("missing", ["train", "val"])
def test_a_folder_without_a_part_is_refused(tmp_path, missing):
    config = folder_of_images(tmp_path, parts={"train", "val"} - {missing})
    with pytest.raises(InputError, match=f"needs .*{missing}"):
        open_data(config)


def test_a_class_that_only_validation_has_is_refused(tmp_path):
    config = folder_of_images(tmp_path)
    (tmp_path / "val" / "wasp").mkdir()
    with pytest.raises(InputError, match="wasp"):
        open_data(config)


def test_an_unknown_timm_dataset_is_refused():
    with pytest.raises(InputError, match="torch/no_such"):
        open_data(TrainConfig(arch="test_vit", data="timm:torch/no_such"))


def test_batches_can_start_in_the_middle():
    batches = Batches(10, 3, seed=5)
    batches.epoch = 4
    whole = list(batches)
    assert [len(indices) for _, indices in whole] == [3, 3, 3]
    assert len({index for _, indices in whole for index in indices}) == 9
    batches.start = 2
    assert list(batches) == whole[2:]
    batches.epoch, batches.start = 5, 0
    assert list(batches) != whole


def test_processes_share_a_batch():
    whole = [indices for _, indices in Batches(23, 5, seed=1)]
    shares = [[indices for _, indices in Batches(23, 5, seed=1, rank=rank, world=2)] for rank in (0, 1)]
    assert [a + b for a, b in zip(*shares, strict=True)] == whole


def test_validation_sees_every_image_once():
    shares = [indices for rank in range(3) for _, indices in Batches(10, 4, rank=rank, world=3)]
    assert sorted(index for indices in shares for index in indices) == list(range(10))
