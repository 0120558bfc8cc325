"""Choosing how to train before training: what each recipe would need, and the fastest that fits a budget."""

import bisect
import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lean_arch.memory.checkpoint import apply_checkpointing
from lean_arch.memory.ledger import format_bytes, parse_bytes
from lean_arch.memory.trace import Forecast, fake_copy, forecast

POLICIES = ("none", "selective", "sqrt", "all")  # from the least recomputed to the most
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


class BudgetError(ValueError):
    """No recipe fits the budget; the message says the least that could."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to make a step, and what it would take."""

    batch_size: int
    micro_batch_size: int
    precision: str
    checkpoint: str | int
    optimizer: str | Callable
    clip_grad: float
    predicted: Forecast | None = None

    @property
    def accumulation_steps(self) -> int:
        return -(-self.batch_size // self.micro_batch_size)

    @property
    def step_flops(self) -> int:
        """Floating-point operations of a whole step, recomputation included."""
        return round(self.predicted.flops * self.batch_size / min(self.batch_size, 2 * self.micro_batch_size))

    def to_args(self) -> list[str]:
        """Options of train.py."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "predicted"}
        if not isinstance(self.optimizer, str):
            del options["optimizer"]
        return [part for name, value in options.items() for part in (f"--{name}", str(value))]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The recipes that were examined: first those that fit, in each part the fastest first."""

    recipes: tuple[Recipe, ...]

    @property
    def best(self) -> Recipe:
        return self.recipes[0]

    @property
    def predicted_peak_bytes(self) -> int:
        return self.best.predicted.peak_bytes

    @property
    def predicted_step_flops(self) -> int:
        return self.best.step_flops

    def to_args(self) -> list[str]:
        return self.best.to_args()


def plan(
    model: nn.Module | Callable[[], nn.Module],
    sample: tuple[torch.Tensor, torch.Tensor],
    budget: str | int | None = None,
    device: str = "cpu",
    *,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    precision: str = "fp32",
    checkpoint: str | int | None = None,
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "adamw",
    clip_grad: float = 0.0,
    make_step: Callable | None = None,
) -> Plan:
    """The recipe that trains `model` fastest within `budget`, by running steps on fake tensors.

    What is not held fixed is tried: micro-batches of the whole batch, its half, and so on to one; the policies of
    `apply_checkpointing`. Less recomputation counts as faster, then larger micro-batches. Without a budget the
    fastest recipe is the plan. The model, its gradients and its mode stay as they are.

    Args:
        model: the model, or a function without arguments that builds it.
        sample: (inputs (B, ...), targets (B, ...)); only their shapes and dtypes matter.
        budget: "4GiB", "500MB" or bytes; the peak must not exceed it.
        device: where the step would run; "cpu".
        batch_size: samples of an optimizer step; default: those of `sample`.
        micro_batch_size: samples of a forward and backward; gradients accumulate over the batch.
        precision: "bf16" or "fp16" (autocast), or "fp32".
        checkpoint: a policy of `apply_checkpointing`.
        optimizer: a class of torch.optim by its name in any case ("adamw"), with its defaults, or a function that
            takes the model and returns its optimizer.
        clip_grad: largest norm of the gradients; 0 does not clip.
        make_step: `make_step(model, inputs, targets, recipe)` returns `(fn, *held)`, a step in the words of
            `forecast`, in place of the plain one: cross-entropy, `optimizer`, gradients set to None at the end. It
            gets two micro-batches at most, for a third takes no more memory than the second.

    Raises BudgetError when nothing fits, ValueError for an argument that is not one of the above.
    """
    limit = None if budget is None else parse_bytes(budget)
    batch_size = len(sample[0]) if batch_size is None else batch_size
    micro = batch_size if micro_batch_size is None else micro_batch_size
    _check(device, batch_size, micro, precision)
    recipe = Recipe(batch_size, micro, precision, checkpoint or POLICIES[0], optimizer, clip_grad)
    if not isinstance(model, nn.Module):
        model = model()

    tried = []

    def fits(policy, size) -> bool:
        wanted = dataclasses.replace(recipe, checkpoint=policy, micro_batch_size=size)
        tried.append(dataclasses.replace(wanted, predicted=_predict(model, sample, wanted, make_step or plain_step)))
        return limit is None or tried[-1].predicted.peak_bytes <= limit

    sizes = _halves(batch_size) if micro_batch_size is None and limit is not None else [micro]
    for policy in POLICIES if checkpoint is None else (checkpoint,):
        # A smaller micro-batch never takes more: where the smallest does not fit, none does (and it is the quickest
        # to try); where it does, the largest that fits is found by halving the list.
        if fits(policy, sizes[-1]):
            bisect.bisect_left(sizes[:-1], True, key=functools.partial(fits, policy))
            break
    else:
        least = min(tried, key=lambda one: one.predicted.peak_bytes)
        raise BudgetError(
            f"budget {_written(budget)} is too small: the least that would do is "
            f"{format_bytes(least.predicted.peak_bytes)}, with micro_batch_size {least.micro_batch_size} and "
            f"checkpoint {least.checkpoint}"
        )
    over = {id(one): limit is not None and one.predicted.peak_bytes > limit for one in tried}
    return Plan(tuple(sorted(tried, key=lambda one: (over[id(one)], one.step_flops, -one.micro_batch_size))))


def _written(budget: str | int) -> str:
    return budget if isinstance(budget, str) else format_bytes(budget)


def _halves(size: int) -> list[int]:
    return [size] if size == 1 else [size, *_halves(size // 2)]


def _check(device, batch_size, micro_batch_size, precision):
    if torch.device(device).type != "cpu":
        raise ValueError(f"device {device!r} cannot be planned for; 'cpu' can")
    for name, size in (("batch_size", batch_size), ("micro_batch_size", micro_batch_size)):
        if size < 1:
            raise ValueError(f"{name} {size} must be 1 or more")
    if micro_batch_size > batch_size:
        raise ValueError(f"micro_batch_size {micro_batch_size} is more than batch_size; {batch_size} is the most")
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} must be one of {', '.join(PRECISIONS)}")


def _predict(model: nn.Module, sample, recipe: Recipe, make_step) -> Forecast:
    def build():
        inputs, targets = (torch.empty(recipe.batch_size, *part.shape[1:], dtype=part.dtype) for part in sample)
        copy = apply_checkpointing(fake_copy(model).train(), recipe.checkpoint)
        few = 2 * recipe.micro_batch_size
        fn, *held = make_step(copy, inputs[:few], targets[:few], recipe)
        return fn, *held, inputs, targets

    return forecast(build)


def plain_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, recipe: Recipe) -> tuple:
    """A step of `recipe`: cross-entropy in float32 under autocast, accumulated, clipped and applied."""
    optimizer = torch_optimizer(model, recipe.optimizer)
    dtype = PRECISIONS[recipe.precision]

    def step():
        pieces = zip(inputs.split(recipe.micro_batch_size), targets.split(recipe.micro_batch_size))
        for images, labels in pieces:
            with torch.autocast(images.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
                logits = model(images)
            (F.cross_entropy(logits.float(), labels, reduction="sum") / recipe.batch_size).backward()
        if recipe.clip_grad:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, model, optimizer


def torch_optimizer(model: nn.Module, optimizer: str | Callable) -> torch.optim.Optimizer:
    """The class of torch.optim named `optimizer` (in any case) over the trained parameters, or `optimizer(model)`."""
    if not isinstance(optimizer, str):
        return optimizer(model)
    classes = {name.lower(): thing for name, thing in vars(torch.optim).items() if isinstance(thing, type)}
    del classes["optimizer"]
    if optimizer.lower() not in classes:
        known = ", ".join(sorted(classes))
        raise ValueError(f"optimizer {optimizer!r} is not in torch.optim ({known}); pass a function that makes it")
    return classes[optimizer.lower()]([p for p in model.parameters() if p.requires_grad])
