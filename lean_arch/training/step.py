"""One optimizer step, and the model it trains. The loop and the planner run this same code."""

import contextlib

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from lean_arch.models import create_model
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import Data, one_line


class Step:
    """Trains `model` on one whole batch, in micro-batches, and returns the batch's mean loss.

    The loss of every micro-batch is its sum over the size of the whole batch, so the gradients are those of the whole
    batch however it is cut. `batch_size` counts the images of all processes; each passes its own share.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        accelerator: Accelerator,
        *,
        batch_size: int,
        micro_batch_size: int,
        clip_grad: float = 0.0,
        label_smoothing: float = 0.0,
    ):
        self.model, self.optimizer, self.accelerator = model, optimizer, accelerator
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.clip_grad, self.label_smoothing = clip_grad, label_smoothing

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """images (B, C, H, W), labels (B,) int64 -> this process's part of the mean loss, a scalar without graph."""
        total = torch.zeros((), device=images.device)
        pieces = list(zip(images.split(self.micro_batch_size), labels.split(self.micro_batch_size)))
        for number, piece in enumerate(pieces, start=1):
            waiting = self.accelerator.no_sync(self.model) if number < len(pieces) else contextlib.nullcontext()
            with waiting:
                loss = self.loss(*piece)
                total += loss.detach()
                # DDP averages over processes what must be summed
                self.accelerator.backward(loss * self.accelerator.num_processes)
        if self.clip_grad:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with self.accelerator.autocast():
            logits = self.model(images)
        losses = F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=self.label_smoothing)
        return losses / self.batch_size


def build_model(config: TrainConfig, data: Data) -> nn.Module:
    """`config.arch` for the classes, channels and image size of `data`, its weights drawn from `config.seed`.

    Raises InputError when there is no such arch, or it does not take the image size or the drop rates.
    """
    options = {"num_classes": data.num_classes, "in_chans": data.in_chans}
    wanted = {name: getattr(config, name) for name in ("drop_rate", "drop_path_rate")}
    options |= {name: value for name, value in wanted.items() if value is not None}
    torch.manual_seed(config.seed)
    try:
        try:
            model = create_model(config.arch, img_size=data.img_size, **options)
        except TypeError as error:  # convolutional nets take any size, and no such argument
            if "img_size" not in str(error):
                raise
            model = create_model(config.arch, **options)
    except TypeError as error:
        refused = next((name for name in options if name in str(error)), None)
        if refused is None:
            raise
        value = options[refused]
        raise InputError(f"{refused} {value} is not something that arch {config.arch} takes; leave it out") from error
    except (ValueError, AssertionError) as error:
        raise InputError(one_line(error)) from error
    check_size(config.arch, model, data)
    return model


def check_size(arch: str, model: nn.Module, data: Data) -> None:
    """Raises InputError unless `arch` takes images of the side `data.img_size`."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    side = (max(patch) if isinstance(patch, tuple | list) else patch) or 1
    if data.img_size % side:
        near = max(data.img_size // side, 1) * side
        raise InputError(
            f"img_size {data.img_size} is not a multiple of the {side}-pixel patch of arch {arch}; "
            f"{near} or {near + side} would work"
        )
