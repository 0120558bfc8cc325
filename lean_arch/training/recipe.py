"""From what the user asked for to what will run: device, precision, data, model, micro-batches, checkpointing.

Everything that can go wrong with the input goes wrong here, before a file is written or a step is made.
"""

import contextlib
import dataclasses
import functools

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs
from torch import nn

from lean_arch.memory import apply_checkpointing, parse_bytes, plan
from lean_arch.memory.trace import Forecast, fake_copy, forecast
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import Data, one_line, open_data
from lean_arch.training.optim import make_optimizer
from lean_arch.training.step import Step, build_model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass
class Recipe:
    """A run that is ready to start."""

    config: TrainConfig
    data: Data
    model: nn.Module
    accelerator: Accelerator
    precision: str
    micro_batch_size: int
    checkpoint: str | int
    predicted: Forecast

    @property
    def share(self) -> int:
        """Images of a batch that fall to one process, at most."""
        return -(-self.config.batch_size // self.accelerator.num_processes)

    @property
    def accumulation_steps(self) -> int:
        return -(-self.share // self.micro_batch_size)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data.train) // self.config.batch_size

    @property
    def total_steps(self) -> int:
        return self.config.max_steps or self.config.epochs * self.steps_per_epoch

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self, model: nn.Module, optimizer, engine) -> Step:
        return Step(
            model,
            optimizer,
            engine,
            batch_size=self.config.batch_size,
            micro_batch_size=self.micro_batch_size,
            clip_grad=self.config.clip_grad,
            label_smoothing=self.config.label_smoothing,
        )

    def predict(self, lean: bool = True) -> Forecast:
        """The memory of one step in the steady state; `lean=False`: activations stored, nothing recomputed."""

        def build():
            model = fake_copy(self.model).train()
            if not lean:
                without_lean_parts(model)
            optimizer = make_optimizer(self.config, model)
            images, labels = map(fake_copy, sample_batch(self.data, self.share))
            step = self.step(model, optimizer, Rehearsal(self.precision))
            return functools.partial(step, images, labels), model, optimizer, images, labels

        return forecast(build)

    @property
    def has_lean_parts(self) -> bool:
        return self.checkpoint != "none" or hasattr(self.model, "set_reversible")


class Rehearsal:
    """Stands in for Accelerate while a step runs on fake CPU tensors."""

    num_processes = 1
    clip_grad_norm_ = staticmethod(nn.utils.clip_grad_norm_)
    backward = staticmethod(torch.Tensor.backward)

    def __init__(self, precision: str):
        self.precision = precision

    def autocast(self):
        return torch.autocast(
            "cpu", DTYPES[self.precision] if self.precision != "fp32" else None, self.precision != "fp32", False
        )

    def no_sync(self, model):
        return contextlib.nullcontext()


def prepare(config: TrainConfig) -> Recipe:
    """Builds all that `config` asks for. Raises InputError, in one sentence, when something in it cannot be."""
    config.check()
    try:
        budget = parse_bytes(config.budget) if config.budget else None
    except ValueError as error:
        raise InputError(one_line(error)) from error
    device = PartialState().device
    precision = choose_precision(config.precision, device)
    AcceleratorState._reset_state()  # an earlier run of this process may have had another precision
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        kwargs_handlers=[AutocastKwargs(cache_enabled=False)],
    )
    data = open_data(config)
    if config.batch_size > len(data.train):
        raise InputError(f"batch_size {config.batch_size} is more than the {len(data.train)} training images of {config.data}")
    if config.batch_size < accelerator.num_processes:
        raise InputError(f"batch_size {config.batch_size} leaves some of the {accelerator.num_processes} processes without images")
    model = build_model(config, data)
    recipe = Recipe(config, data, model, accelerator, precision, 0, "none", None)
    recipe.micro_batch_size, recipe.checkpoint = choose_recipe(recipe, budget)
    try:
        apply_checkpointing(model, recipe.checkpoint)
    except ValueError as error:
        raise InputError(one_line(error)) from error
    try:
        recipe.predicted = recipe.predict()
    except AssertionError as error:  # how timm's models refuse a shape
        raise InputError(f"img_size {data.img_size} does not suit arch {config.arch}: {one_line(error)}") from error
    return recipe


def choose_precision(wanted: str, device: torch.device) -> str:
    """`wanted`, or what the device does fast. Raises InputError for what it cannot do."""
    if device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        fast = "bf16" if bf16 else "fp16"
        refused = () if bf16 else ("bf16",)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        fast = "bf16" if device.type == "cpu" and native else "fp32"
        refused = ("fp16",)
    if wanted in refused:
        raise InputError(f"precision {wanted!r} does not work on this {device.type}; {fast} does")
    return fast if wanted == "auto" else wanted


def choose_recipe(recipe: Recipe, budget: int | None) -> tuple[int, str | int]:
    """(micro_batch_size, checkpoint): as given, and where they are "auto" by the planner if there is a budget."""
    config = recipe.config
    micro, policy = config.micro_batch_size, config.checkpoint
    if budget is None:
        return recipe.share if micro == "auto" else min(micro, recipe.share), "none" if policy == "auto" else policy
    held = {"batch_size": recipe.share, "precision": recipe.precision, "optimizer": config.optimizer}
    held |= {"micro_batch_size": micro} if micro != "auto" else {}
    held |= {"checkpoint": policy} if policy != "auto" else {}
    sample = sample_batch(recipe.data, recipe.share)
    device = recipe.accelerator.device.type
    try:
        best = plan(recipe.model, sample, budget=budget, device=device, clip_grad=config.clip_grad, **held).best
    except ValueError as error:
        raise InputError(one_line(error)) from error
    return best.micro_batch_size, best.checkpoint


def sample_batch(data: Data, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of the right shapes, without content."""
    return torch.empty(size, data.in_chans, data.img_size, data.img_size), torch.empty(size, dtype=torch.int64)


def without_lean_parts(model: nn.Module) -> None:
    apply_checkpointing(model, "none")
    if hasattr(model, "set_reversible"):
        model.set_reversible(False)
