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

from lean_arch.memory import apply_checkpointing
from lean_arch.memory.plan import PRECISIONS, Plan, plan
from lean_arch.memory.trace import Forecast
from lean_arch.models import check_name
from lean_arch.registry import SEQUENCE_MODELS
from lean_arch.training.adapter import attach_adapter, base_of, load_weights
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import Data, one_line, open_data
from lean_arch.training.optim import make_optimizer
from lean_arch.training.step import Step, build_model, build_sequence_model
from lean_arch.training.text import TextData, open_text


@dataclasses.dataclass
class Prepared:
    """A run that is ready to start."""

    config: TrainConfig
    data: Data | TextData
    model: nn.Module
    accelerator: Accelerator
    precision: str
    micro_batch_size: int | None = None
    checkpoint: str | int | None = None
    predicted: Forecast | None = None
    base: str | None = None  # hash of what an adapter stands on
    new: tuple[str, ...] = ()  # parameters for which the file of `init_from` had none that fit

    @property
    def share(self) -> int:
        """Samples of a batch that fall to one process, at most."""
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
    def validate_every(self) -> int:
        """Steps between two looks at the validation data."""
        return self.config.validate_every or self.steps_per_epoch

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def step(self, model: nn.Module, optimizer, engine, micro_batch_size: int) -> Step:
        return Step(
            model,
            optimizer,
            engine,
            functools.partial(self.data.loss, label_smoothing=self.config.label_smoothing),
            micro_batch_size=micro_batch_size,
            clip_grad=self.config.clip_grad,
        )

    def predict_plain(self) -> Forecast:
        """The memory of a step of the same arch without its lean parts: all stored, nothing recomputed."""
        held = {"micro_batch_size": self.micro_batch_size, "checkpoint": "none"}
        return planned(self, reversible=False, **held).best.predicted

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
        dtype = PRECISIONS[self.precision]
        return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)

    def no_sync(self, model):
        return contextlib.nullcontext()

    def reduce(self, tensor, reduction):
        return tensor


def prepare(config: TrainConfig) -> Prepared:
    """Builds all that `config` asks for. Raises InputError, in one sentence, when something in it cannot be."""
    config.check()
    try:
        check_name(config.arch)
    except ValueError as error:
        raise InputError(str(error)) from error
    config = config.settled()
    cpu = not torch.accelerator.is_available()  # said outright, or a launch's processes take no notice of each other
    device = PartialState(cpu=cpu).device
    precision = choose_precision(config.precision, device)
    AcceleratorState._reset_state()  # an earlier run of this process may have had another precision
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="no" if precision == "fp32" else precision,
        kwargs_handlers=[AutocastKwargs(cache_enabled=False)],
    )
    if config.arch in SEQUENCE_MODELS:
        model = build_sequence_model(config)
        data = open_text(config, model.seq_len, model.objective)
    else:
        data = open_data(config)
        model = build_model(config, data)
    least, most = accelerator.num_processes, len(data.train)
    if not least <= config.batch_size <= most:
        raise InputError(
            f"batch_size {config.batch_size} does not suit {most} training {data.unit} and {least} processes; "
            f"{least} to {most} would work"
        )
    recipe = Prepared(config, data, model, accelerator, precision)
    if config.init_from is not None:
        recipe.new = tuple(load_weights(config, model))
    if config.adapter is not None:
        attach_adapter(config, data, model)
        recipe.base = base_of(model)
    best = choose(recipe)
    recipe.micro_batch_size, recipe.checkpoint = best.micro_batch_size, best.checkpoint
    recipe.predicted = best.predicted
    apply_checkpointing(model, recipe.checkpoint)
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


def choose(recipe: Prepared):
    """The planner's recipe: micro_batch_size and checkpoint as given, or its choice if there is a budget to keep."""
    config = recipe.config
    micro, policy = config.micro_batch_size, config.checkpoint
    held = {}
    if micro != "auto" or config.budget is None:
        held["micro_batch_size"] = recipe.share if micro == "auto" else min(micro, recipe.share)
    if policy != "auto" or config.budget is None:
        held["checkpoint"] = "none" if policy == "auto" else policy
    try:
        return planned(recipe, budget=config.budget, **held).best
    except ValueError as error:  # the budget is too small, or the arch has fewer blocks than segments
        raise InputError(one_line(error)) from error
    except (AssertionError, RuntimeError) as error:  # how models refuse a shape
        if "size" not in str(error).lower():
            raise
        (name, size), arch = *recipe.data.facts.items(), config.arch
        raise InputError(f"{name} {size} does not suit arch {arch}: {one_line(error)}; try another") from error


def planned(recipe: Prepared, reversible: bool = True, **held) -> Plan:
    """Runs the loop's own step on fake CPU tensors."""

    def make_step(model, inputs, targets, candidate):
        if not reversible and hasattr(model, "set_reversible"):
            model.set_reversible(False)
        optimizer = make_optimizer(recipe.config, model)
        step = recipe.step(model, optimizer, Rehearsal(recipe.precision), candidate.micro_batch_size)
        return functools.partial(step, inputs, targets), model, optimizer

    sample = recipe.data.sample(recipe.share)
    return plan(recipe.model, sample, make_step=make_step, precision=recipe.precision, **held)
