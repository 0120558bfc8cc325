"""Images to train on: scikit-learn's digits, a folder, or any of timm's map-style datasets.

A dataset here maps a key `(epoch, indices)` to a whole batch `(images (B, C, H, W) float32, labels (B,) int64)`.
What is random about a sample depends on (seed, epoch, index) alone, so a resumed run and any number of workers see
the same bits, and nobody else's random stream is touched.
"""

import contextlib
import dataclasses
import math
import pathlib
import random
from collections.abc import Iterator

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.data import create_dataset, create_transform, resolve_data_config
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lean_arch.models import create_model
from lean_arch.training.config import InputError, TrainConfig

DIGITS_SIZE = 32  # least
DIGITS_MEAN, DIGITS_STD = 0.305, 0.376
VALIDATION_NAMES = ("val", "validation", "valid", "test")


@dataclasses.dataclass
class Data:
    """Two datasets of images, what a model must know of them, and what the loop must."""

    train: Dataset
    val: Dataset
    num_classes: int
    in_chans: int
    img_size: int

    unit = "images"
    digest = None  # images are not read before their turn

    @property
    def size(self) -> str:
        return f"{self.img_size} px"

    @property
    def facts(self) -> dict:
        return {"img_size": self.img_size}

    def speed(self, samples_per_s: float) -> str:
        return f"{samples_per_s:.0f} samples/s"

    def sample(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors of the shapes and dtypes of `count` images and their labels."""
        return torch.empty(count, self.in_chans, self.img_size, self.img_size), torch.empty(count, dtype=torch.int64)

    @staticmethod
    def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
        """Summed over the images."""
        return F.cross_entropy(model(images).float(), labels, reduction="sum", label_smoothing=label_smoothing)


class Digits(Dataset):
    """The 1797 handwritten digits of scikit-learn (8x8, 16 grey levels), drawn at `img_size` pixels a side.

    Every fifth scan of a digit is for validation, whatever the seed. Training images are turned, scaled, sheared and
    shifted a little; the drawing and the distortion are one bicubic sampling of the scan.
    """

    def __init__(self, img_size: int, train: bool, seed: int):
        from sklearn.datasets import load_digits  # takes a second that only digits should cost

        scans = load_digits()
        labels = torch.from_numpy(scans.target).long()
        order = F.one_hot(labels).cumsum(0).gather(1, labels[:, None])[:, 0] - 1  # n-th scan of its digit
        chosen = (order % 5 != 0) if train else (order % 5 == 0)
        self.scans = torch.from_numpy(scans.images).float()[chosen, None] / 16
        self.labels = labels[chosen]
        self.img_size, self.train, self.seed = img_size, train, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, indices = key
        theta = torch.eye(2, 3).repeat(len(indices), 1, 1)
        if self.train:
            theta = torch.stack([self._distortion(epoch, index) for index in indices])
        at = (torch.arange(self.img_size) * 2 + 1) / self.img_size - 1
        y, x = at[:, None, None], at[None, :, None]
        # elementwise, so that a sample's bits do not depend on its neighbours
        grid = theta[:, None, None, :, 0] * x + theta[:, None, None, :, 1] * y + theta[:, None, None, :, 2]
        images = F.grid_sample(self.scans[indices], grid, mode="bicubic", align_corners=False)
        return (images - DIGITS_MEAN) / DIGITS_STD, self.labels[indices]

    def _distortion(self, epoch: int, index: int) -> torch.Tensor:
        turn, wide, high, shear, x, y = np.random.default_rng([self.seed, epoch, index]).uniform(-1, 1, 6)
        sin, cos = math.sin(0.25 * turn), math.cos(0.25 * turn)
        wide, high, shear = 1 + 0.15 * wide, 1 + 0.15 * high, 0.2 * shear
        rows = [cos * wide, (shear * cos - sin) * high, 0.15 * x], [sin * wide, (shear * sin + cos) * high, 0.15 * y]
        return torch.tensor(rows, dtype=torch.float32)


class Images(Dataset):
    """A map-style dataset of (PIL image, label) under a timm transform."""

    def __init__(self, source: Dataset, transform, seed: int):
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, indices = key
        images, labels = [], []
        for index in indices:
            with own_randomness(self.seed, epoch, index):
                image, label = self.source[index]
                images.append(self.transform(image.convert("RGB")))
                labels.append(int(label))
        return torch.stack(images), torch.tensor(labels)


def digits_size(arch: str) -> int:
    """Side in pixels at which `arch` sees digits by default: at least 32, with two pixels or more to its last map's.

    A last map of a single pixel leaves BatchNorm only the batch to average over, and the last stages nothing to move.
    """
    with torch.device("meta"):
        stages = create_model(arch).feature_info
    stride = max(stage["reduction"] for stage in stages)
    return stride * max(2, math.ceil(DIGITS_SIZE / stride))


@contextlib.contextmanager
def own_randomness(*key: int) -> Iterator[None]:
    """Within, Python's, NumPy's and PyTorch's CPU generators start from `key`; after, they are as they were."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed), np.random.seed(seed), torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])


def open_data(config: TrainConfig) -> Data:
    """The datasets that `config.data` names. Raises InputError where they cannot be had."""
    kind, _, place = config.data.partition(":")
    if kind == "digits":
        if config.num_classes not in (None, 10):
            raise InputError(f"num_classes {config.num_classes} does not suit digits, which has 10; leave it out")
        size = config.img_size or digits_size(config.arch)
        return Data(Digits(size, True, config.seed), Digits(size, False, config.seed), 10, 1, size)
    train, val = open_folder(place) if kind == "folder" else open_timm(place, config.data_dir)
    pretrained = timm.get_pretrained_cfg(config.arch)
    pretrained = pretrained.to_dict() if pretrained else {}
    recipe = resolve_data_config({"img_size": config.img_size}, pretrained_cfg=pretrained)
    looks = {key: recipe[key] for key in ("input_size", "interpolation", "mean", "std")}
    return Data(
        Images(train, create_transform(**looks, is_training=True), config.seed),
        Images(val, create_transform(**looks, is_training=False, crop_pct=recipe["crop_pct"]), config.seed),
        count_classes(train, config.data, config.num_classes),
        3,
        recipe["input_size"][-1],
    )


def open_folder(place: str) -> tuple[Dataset, Dataset]:
    """The training and validation sets in PATH/train and PATH/val, a folder a class."""
    root = pathlib.Path(place)
    val = next((root / name for name in VALIDATION_NAMES if (root / name).is_dir()), None)
    if not (root / "train").is_dir() or val is None:
        raise InputError(
            f"data 'folder:{place}' needs {root / 'train'} and {root / 'val'}, with a folder a class in each"
        )
    classes = sorted(child.name for child in (root / "train").iterdir() if child.is_dir())
    strangers = sorted({child.name for child in val.iterdir() if child.is_dir()} - set(classes))
    if not classes or strangers:
        wrong = f"{val} has the class {strangers[0]!r}, which is not there" if strangers else "it has none"
        raise InputError(f"data 'folder:{place}' takes its classes from the folders in {root / 'train'}, and {wrong}")
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        train, val = (create_dataset("", root=str(part), class_map=numbers) for part in (root / "train", val))
    except RuntimeError as error:  # timm found no image
        raise InputError(f"data 'folder:{place}' cannot be read: {one_line(error)}") from error
    return train, val


def open_timm(name: str, root: str) -> tuple[Dataset, Dataset]:
    """The training and validation sets that timm calls `name`, as torch/cifar10 or hfds/user/name."""
    try:
        train = create_dataset(name, root=root, split="train", is_training=True, download=True)
        try:
            val = create_dataset(name, root=root, split="validation", download=True)
        except ValueError:  # Hugging Face names its splits as it likes
            val = create_dataset(name, root=root, split="test", download=True)
    except Exception as error:  # whatever the reader of that dataset raises
        said = one_line(error)
        raise InputError(f"data 'timm:{name}' cannot be opened: {said}; a name as torch/cifar10 works") from error
    if not hasattr(train, "__getitem__"):
        raise InputError(f"data 'timm:{name}' is a stream, which cannot be resumed; a dataset with random access works")
    return train, val


def count_classes(dataset: Dataset, name: str, wanted: int | None) -> int:
    """How many classes a model needs: `wanted`, or else those of the dataset. Raises InputError for too few."""
    reader = getattr(dataset, "reader", dataset)
    features = getattr(getattr(reader, "dataset", None), "features", {})
    names = getattr(reader, "class_to_idx", None) or getattr(reader, "classes", None)
    if not names and "label" in features:
        names = features["label"].names
    if not names and wanted is None:
        raise InputError(f"num_classes is missing; {name} does not say how many it has, give --num_classes N")
    if names and wanted is not None and wanted < len(names):
        raise InputError(f"num_classes {wanted} is too small; {name} has {len(names)}")
    classes = wanted or len(names)
    if classes < 2:
        raise InputError(f"num_classes is {classes} in {name}, which leaves nothing to learn; 2 or more work")
    return classes


class Batches(Sampler):
    """Keys of whole batches: this process's share of each batch of `epoch`, from batch number `start` on.

    With `seed` the order is a permutation drawn from (seed, epoch), and images that do not fill a batch wait for
    another epoch; without, every image comes once, in order.
    """

    def __init__(self, length: int, batch_size: int, seed: int | None = None, rank: int = 0, world: int = 1):
        self.length, self.batch_size, self.seed, self.rank, self.world = length, batch_size, seed, rank, world
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self.length // self.batch_size if self.seed is not None else math.ceil(self.length / self.batch_size)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        order = np.arange(self.length)
        if self.seed is not None:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        for number in range(self.start, len(self)):
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            share = np.array_split(batch, self.world)[self.rank].tolist()
            if share:
                yield self.epoch, share


def loader(dataset: Dataset, batches: Batches, config: TrainConfig) -> DataLoader:
    """A DataLoader of whole batches. Change `batches.epoch` and `.start` between two walks over it."""
    workers = config.loading_workers
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=(config.prefetch or 2) if workers else None,
        pin_memory=torch.cuda.is_available() if config.pin_memory is None else config.pin_memory,
        generator=torch.Generator(),  # or it would draw from the global one
    )


def one_line(error: Exception) -> str:
    """The first line of an error's message, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
