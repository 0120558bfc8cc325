"""The optimizer, from timm's factory, and the learning rate of each step."""

import difflib
import math

import timm.optim
from torch import nn
from torch.optim import Optimizer

from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import one_line


def make_optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    """timm's optimizer of that name over the parameters of `model`; biases and norms without weight decay.

    Raises InputError, with the nearest names, when timm has no such optimizer or cannot build it here.
    """
    name = config.optimizer.lower()
    names = timm.optim.list_optimizers()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3) or ["adamw", "sgd", "lion"]
        raise InputError(f"optimizer {config.optimizer!r} does not exist; nearest: {', '.join(near)}")
    try:
        return timm.optim.create_optimizer_v2(model, name, lr=config.lr, weight_decay=config.weight_decay)
    except (ImportError, AssertionError, RuntimeError) as error:  # a package or a device it needs
        raise InputError(f"optimizer {config.optimizer!r} cannot be used here: {one_line(error)}; adamw can") from error


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Of step 1, 2, ... `total`: a linear rise over the first `warmup` share, then half a cosine down to `min_lr`."""
    rising = math.ceil(config.warmup * total)
    if step <= rising:
        return config.lr * step / rising
    done = (step - rising) / max(total - rising, 1)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * done)) / 2
