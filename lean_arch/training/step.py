"""One optimizer step, and the model it trains. The loop and the planner run this same code."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from lean_arch.models import create_model
from lean_arch.models.lean_sequence import IGNORED
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import Data, one_line


class Step:
    """Trains `model` on one whole batch, in micro-batches, and returns the batch's mean loss.

    `loss(model, inputs, targets)` is a sum over the targets that count (those that are not -100). Every micro-batch
    divides it by their number in the whole batch, over all processes, so the gradients are those of the whole batch
    however it is cut, and wherever the targets lie. Each process passes its own share of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        accelerator: Accelerator,
        loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        micro_batch_size: int,
        clip_grad: float = 0.0,
    ):
        self.model, self.optimizer, self.accelerator, self.loss = model, optimizer, accelerator, loss
        self.micro_batch_size, self.clip_grad = micro_batch_size, clip_grad

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """inputs (B, ...), targets (B, ...) int64 -> this process's part of the mean loss, a scalar without graph."""
        total = torch.zeros((), device=inputs.device)
        count = self.accelerator.reduce((targets != IGNORED).sum(), "sum")
        pieces = list(zip(inputs.split(self.micro_batch_size), targets.split(self.micro_batch_size)))
        for number, piece in enumerate(pieces, start=1):
            waiting = self.accelerator.no_sync(self.model) if number < len(pieces) else contextlib.nullcontext()
            with waiting:
                with self.accelerator.autocast():
                    loss = self.loss(self.model, *piece) / count
                total += loss.detach()
                # DDP averages over processes what must be summed
                self.accelerator.backward(loss * self.accelerator.num_processes)
        if self.clip_grad:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def build_sequence_model(config: TrainConfig) -> nn.Module:
    """`config.arch` for sequences of `config.seq_len`, its weights drawn from `config.seed`.

    Raises InputError when it does not take the length or the drop rates.
    """
    options = given(config, "seq_len", "drop_rate", "drop_path_rate")
    torch.manual_seed(config.seed)
    with refusing(config.arch, options):
        return create_model(config.arch, **options)


def build_model(config: TrainConfig, data: Data) -> nn.Module:
    """`config.arch` for the classes, channels and image size of `data`, its weights drawn from `config.seed`.

    A classifier that would begin too loud is made quieter. Raises InputError when there is no such arch, or it does not
    take the image size or the drop rates.
    """
    options = {"num_classes": data.num_classes, "in_chans": data.in_chans}
    options |= given(config, "drop_rate", "drop_path_rate")
    options |= {"pretrained": True} if config.pretrained else {}
    torch.manual_seed(config.seed)
    with refusing(config.arch, options), reaching_weights(config):
        try:
            model = create_model(config.arch, img_size=data.img_size, **options)
        except TypeError as error:  # convolutional nets take any size, and no such argument
            if "img_size" not in str(error):
                raise
            model = create_model(config.arch, **options)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            size = f"arch {config.arch} at img_size {data.img_size}"
            raise InputError(f"{size} does not fit in memory; a smaller one would") from error
    check_size(config.arch, model, data)
    quieten_classifier(model)
    return model


@torch.no_grad()
def quieten_classifier(model: nn.Module) -> None:
    """Scales down, in place, classifier weights whose standard deviation is above 1 / sqrt(inputs).

    At that bound features of unit variance give logits of unit variance (LeCun et al. 1998, Efficient BackProp, section
    4.6). timm draws the classifiers of its mobile nets by the number of classes alone, with a thousand in mind: ten
    classes make them six times as loud, the first predictions sure and wrong, and clipping leaves little of gradients.
    """
    heads = model.get_classifier()  # a tuple where one is distilled
    for head in heads if isinstance(heads, tuple) else (heads,):
        for layer in head.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                bound, spread = layer.weight[0].numel() ** -0.5, layer.weight.std().item()
                if spread > bound:
                    layer.weight.mul_(bound / spread)


def given(config: TrainConfig, *names: str) -> dict:
    """Those of the options that the user gave, with their values."""
    return {name: getattr(config, name) for name in names if getattr(config, name) is not None}


@contextlib.contextmanager
def refusing(arch: str, options: dict) -> Iterator[None]:
    """Within, what the constructor of `arch` refuses ends in an InputError."""
    try:
        yield
    except TypeError as error:
        refused = next((name for name in options if name in str(error)), None)
        if refused is None:
            raise
        value = options[refused]
        raise InputError(f"{refused} {value} is not something that arch {arch} takes; leave it out") from error
    except (ValueError, AssertionError) as error:
        raise InputError(one_line(error)) from error


@contextlib.contextmanager
def reaching_weights(config: TrainConfig) -> Iterator[None]:
    """Within, whatever keeps pretrained weights from coming ends in an InputError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not config.pretrained:
            raise
        raise InputError(f"pretrained weights of arch {config.arch} cannot be had here: {one_line(error)}") from error


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
