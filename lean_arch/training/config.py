"""What a run is made of: one flat dataclass, the same names on the command line and in YAML.

`TrainConfig` holds what the user asked for, and checks all that can be checked without building anything.
"""

import dataclasses
import math
import os
import pathlib
from typing import Any

import yaml

from lean_arch.memory import parse_bytes
from lean_arch.memory.checkpoint import POLICIES
from lean_arch.memory.plan import PRECISIONS
from lean_arch.registry import SEQUENCE_MODELS


class InputError(ValueError):
    """What the user asked for cannot be done; the message is one sentence that says what would work."""


def option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class TrainConfig:
    """The options of `train.py`. `check()` raises InputError on a value that no run could use."""

    arch: str | None = option(None, "a lean_* architecture or any of timm's")
    data: str | None = option(
        None,
        "digits, folder:PATH (with train/ and val/), timm:NAME, text or text:FILE_OR_FOLDER; "
        "default: text for an arch of sequences, else digits",
    )
    data_dir: str = option("data", "where timm:NAME keeps its files")
    num_classes: int | None = option(None, "classes of the data, where it does not say so itself")
    adapter: str | None = option(
        None, "fine-tune by a method: sparse, lora, ladder, bias, with options as sparse:density=0.02,target=mlp"
    )
    init_from: str | None = option(None, "weights to start from: a safetensors file or the folder of a run")
    pretrained: bool = option(False, "start from the weights that timm knows for the arch")
    img_size: int | None = option(
        None, "side of the images in pixels; default: digits 32, 64 for an arch of stride 32; else the arch's own"
    )
    seq_len: int | None = option(None, "bytes of text in a sequence; default: the arch's own")
    batch_size: int | None = option(
        None, "images or sequences an optimizer step, over all devices; default: images 32, text 16"
    )
    micro_batch_size: int | str = option("auto", "images or sequences a forward pass on one device, or auto")
    precision: str = option("auto", "auto, bf16, fp16 or fp32; auto is bf16 where the device has it")
    checkpoint: int | str = option(
        "auto", "activations to recompute: none, all, sqrt, selective or a number of segments"
    )
    budget: str | None = option(None, "memory the run may use, as 4GiB; picks micro_batch_size and checkpoint")
    optimizer: str = option("adamw", "any name of timm's optimizer factory")
    lr: float = option(1e-3, "peak learning rate")
    min_lr: float = option(1e-5, "learning rate at the last step")
    weight_decay: float = option(0.05, "of weights; biases and norms go free")
    warmup: float = option(0.1, "share of the steps in which the learning rate rises to its peak")
    clip_grad: float = option(1.0, "largest norm of all gradients together; 0: no clipping")
    label_smoothing: float | None = option(None, "share of the target spread over all; default: images 0.1, text 0")
    drop_rate: float | None = option(None, "dropout of the arch; default: the arch's own")
    drop_path_rate: float | None = option(None, "stochastic depth of the arch; default: the arch's own")
    epochs: int | None = option(None, "passes over the training data; default: images 10, text 1")
    max_steps: int | None = option(None, "optimizer steps, in place of epochs")
    seed: int = option(0, "of weights, dropout, order and augmentation")
    workers: int | None = option(
        None, "processes that load data; default: 0 for digits and text, else one a core up to 8"
    )
    prefetch: int | None = option(None, "batches each worker holds ready; default: 2")
    pin_memory: bool | None = option(None, "page-locked batches; default: where there is a GPU")
    output: str | None = option(None, "folder to write to; default: runs/ARCH")
    validate_every: int | None = option(None, "steps between validations; default: an epoch, text 250")
    val_windows: int | None = option(None, "sequences of text to validate on; default: 128")
    checkpoint_every: int | None = option(None, "steps between checkpoints; default: as validate_every")
    stop_after: int | None = option(None, "end at this step as if interrupted, ready for --resume")
    resume: bool = option(False, "go on from the last checkpoint in the output folder")
    compare: list[str] | None = option(None, "archs to train, each in a process of its own")  # noqa: RUF009
    dry_run: bool = option(False, "say what would be run and what memory it takes, write nothing")

    def check(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None and field.default is not None:
                raise InputError(f"{field.name} has no value; leave it out for {field.default!r}, its default")
        if self.arch is None and self.compare is None:
            raise InputError("arch is missing; name one, for example --arch lean_vit")
        if self.arch is not None and self.compare is not None:
            raise InputError(f"arch {self.arch!r} cannot be given beside --compare, which names its archs itself")
        for name in ("dry_run", "resume", "stop_after"):
            if self.compare and getattr(self, name):
                raise InputError(f"{name} does not go with --compare, whose runs start anew and end; leave it out")
        if self.compare is not None and len(set(self.compare)) != max(len(self.compare), 2):
            raise InputError(f"compare {' '.join(self.compare)!r} needs two or more different archs")
        kind, _, place = (self.data or "").partition(":")
        if not (self.data in (None, "digits", "text") or (kind in ("folder", "timm", "text") and place)):
            raise InputError(f"data {self.data!r} is not known; digits, text, text:PATH, folder:PATH and timm:NAME are")
        if kind == "folder" and not pathlib.Path(place).is_dir():
            raise InputError(f"data {self.data!r}: there is no folder {place}; give one that holds train/ and val/")
        if kind == "text" and place and not os.access(place, os.R_OK):
            raise InputError(f"data {self.data!r}: {place} cannot be read; give a text file or a folder of them")
        if self.precision not in ("auto", *PRECISIONS):
            raise InputError(f"precision {self.precision!r} is not one of auto, {', '.join(PRECISIONS)}")
        if isinstance(self.checkpoint, str) and self.checkpoint not in ("auto", *POLICIES):
            raise InputError(f"checkpoint {self.checkpoint!r} is not one of auto, {', '.join(POLICIES)} or a number")
        if self.pretrained and self.init_from is not None:
            raise InputError(f"init_from {self.init_from!r} cannot be given beside --pretrained; leave out one of them")
        if self.budget is not None:
            try:
                parse_bytes(self.budget)
            except ValueError as error:
                raise InputError(str(error)) from error
        if isinstance(self.micro_batch_size, str) and self.micro_batch_size != "auto":
            raise InputError(f"micro_batch_size {self.micro_batch_size!r} is neither a number nor auto")
        for name in COUNTS:
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise InputError(f"{name} {value} is too small; 1 is the least")
        for name in ("seed", "workers", "lr", "min_lr", "weight_decay", "clip_grad"):
            value = getattr(self, name)
            if value is not None and not (0 <= value < math.inf):
                raise InputError(f"{name} {value} is out of range; it is 0 or more")
        for name in ("warmup", "label_smoothing", "drop_rate", "drop_path_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise InputError(f"{name} {value} is out of range; it is a share, 0 or more and below 1")
        if self.seed >= 2**32:
            raise InputError(f"seed {self.seed} is out of range; it is below {2**32}")
        if self.min_lr > self.lr:
            raise InputError(f"min_lr {self.min_lr} is more than lr {self.lr}; give a smaller min_lr or a larger lr")
        most = self.batch_size or self.defaults["batch_size"]
        if isinstance(self.micro_batch_size, int) and self.micro_batch_size > most:
            raise InputError(f"micro_batch_size {self.micro_batch_size} is more than batch_size; {most} is the most")
        if self.prefetch is not None and not self.loading_workers:
            raise InputError(f"prefetch {self.prefetch} needs processes that load ahead; give --workers 1 or more")

    @property
    def defaults(self) -> dict:
        """What options mean that were left out, where that depends on the arch."""
        return TEXT if self.arch in SEQUENCE_MODELS else IMAGES

    def settled(self) -> "TrainConfig":
        """With `defaults` filled in. Raises InputError for data or options that do not go with the arch."""
        filled = {name: value for name, value in self.defaults.items() if getattr(self, name) is None}
        config = dataclasses.replace(self, **filled)
        of_text = self.defaults is TEXT
        if of_text != (config.data.partition(":")[0] == "text"):
            takes = "sequences, as of text" if of_text else "images, as of digits"
            raise InputError(f"data {config.data!r} does not suit arch {self.arch}, which takes {takes}")
        for name in ("num_classes", "img_size", "pretrained") if of_text else ("seq_len", "val_windows"):
            if getattr(self, name) not in (None, False):
                value = getattr(self, name)
                raise InputError(f"{name} {value} means nothing to data {config.data!r}; leave it out")
        return config

    @property
    def loading_workers(self) -> int:
        """Processes that load data, 0 for loading in the training process itself."""
        if self.workers is not None:
            return self.workers
        decodes = (self.data or "").startswith(("folder:", "timm:"))
        return min(os.cpu_count() or 1, 8) if decodes else 0

    def to_yaml(self) -> str:
        """The recipe, without the options that belong to one invocation only; `--config` reads it back."""
        recipe = {name: value for name, value in dataclasses.asdict(self).items() if name not in INVOCATION}
        return yaml.safe_dump(recipe, sort_keys=False)

    def to_arguments(self) -> list[str]:
        """The recipe as arguments of the command line, those that differ from the defaults."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return [f"--{name}={value}" for name, value in values.items() if name not in INVOCATION]


COUNTS = (
    "num_classes", "img_size", "seq_len", "batch_size", "micro_batch_size", "checkpoint", "epochs", "max_steps",
    "prefetch", "validate_every", "val_windows", "checkpoint_every", "stop_after",
)  # fmt: skip
INVOCATION = ("output", "stop_after", "resume", "compare", "dry_run")
# a change in one of these would bend the loss curve of a resumed run
CURVE = (
    "arch", "data", "adapter", "init_from", "pretrained", "num_classes", "img_size", "seq_len", "batch_size",
    "precision", "optimizer", "lr", "min_lr", "weight_decay", "warmup", "clip_grad", "label_smoothing", "drop_rate",
    "drop_path_rate", "epochs", "max_steps", "seed",
)  # fmt: skip
# where `None` means one thing for images and another for text
IMAGES = {"data": "digits", "batch_size": 32, "label_smoothing": 0.1, "epochs": 10}
TEXT = {
    "data": "text", "batch_size": 16, "label_smoothing": 0.0, "epochs": 1, "validate_every": 250, "val_windows": 128,
}  # fmt: skip
