"""What a model's adapters train and take, beside full fine-tuning and LoRA of the same layers."""

import dataclasses

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lean_arch.adapters.attach import activate, attach, detach, settle, trainable_parameters
from lean_arch.adapters.frozen import restore_frozen
from lean_arch.adapters.method import attached
from lean_arch.memory.holdings import storages

ADAM_STATES = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """Bytes of a way of fine-tuning. activations: kept for the backward pass, None where no sample was given."""

    name: str
    trained: int
    weights: int
    gradients: int
    optimizer: int
    activations: int | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """Rows of the adapters, of full fine-tuning and of LoRA; printed, a table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        heads = "", "trained", "share", "weights", "gradients", "AdamW", "activations"
        whole = next(row.trained for row in self.rows if row.name == "full")
        lines = [heads]
        for row in self.rows:
            sizes = (row.weights, row.gradients, row.optimizer, row.activations)
            cells = ("-" if size is None else f"{size / 1e6:.1f} MB" for size in sizes)
            lines.append((row.name, f"{row.trained:,}", f"{row.trained / whole:.2%}", *cells))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def summary(model: nn.Module, sample=None) -> Summary:
    """What each adapter of `model` trains and takes, then "full" fine-tuning and "lora", of rank 8 on its own choice.

    Args:
        model: with one adapter or more, none of them merged; it is as before when this returns.
        sample: its input, to run it once for each row: a tensor, a tuple of arguments or a dict of keywords. The
            activations are those that such a batch keeps, without parameters and buffers, each storage once.

    Raises ValueError where the model has no adapter.
    """
    trainable_parameters(model)
    there = attached(model)
    active = {name: strength for name in there.methods if (strength := strength_of(model, name))}
    rows = []
    try:
        for name in there.methods:
            activate(model, name)
            rows.append(row_of(name, model, trainable_parameters(model, name), sample))
        activate(model, ())
        rows.append(full_row(model, sample))
        attach(model, "lora", name="_lora", activations=there.activations)
        activate(model, "_lora")
        rows.append(row_of("lora", model, trainable_parameters(model, "_lora"), sample))
        detach(model, "_lora")
    finally:
        activate(model, active)
    return Summary(tuple(rows))


def strength_of(model: nn.Module, name: str) -> float:
    parts = [part for _, _, part in attached(model).methods[name].parts(model, name)]
    return parts[0].strength if parts else float(attached(model).methods[name].aside is None)


def full_row(model: nn.Module, sample) -> Row:
    base = [parameter for name, parameter in model.named_parameters() if ".adapters." not in f".{name}"]
    restore_frozen(model)
    try:
        for parameter in base:
            parameter.requires_grad_(parameter.is_floating_point())
        return row_of("full", model, base, sample)
    finally:
        for parameter in base:
            parameter.requires_grad_(False)
        settle(model)


def row_of(name: str, model: nn.Module, trained: list[nn.Parameter], sample) -> Row:
    held = {s._cdata: s.nbytes() for parameter in model.parameters() for s in storages(parameter)}
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    count = sum(parameter.numel() for parameter in trained)
    kept = None if sample is None else kept_bytes(model, sample)
    return Row(name, count, sum(held.values()), nbytes, ADAM_STATES * nbytes, kept)


def kept_bytes(model: nn.Module, sample) -> int:
    """Bytes that one forward pass keeps for the backward pass. Running statistics are put back."""
    own = {s._cdata for tensor in (*model.parameters(), *model.buffers()) for s in storages(tensor)}
    kept = {}

    def pack(tensor):
        kept.update({s._cdata: s.nbytes() for s in storages(tensor) if s._cdata not in own})
        return tensor

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.random.fork_rng():
        out = (
            model(**sample) if isinstance(sample, dict) else model(*sample if isinstance(sample, tuple) else (sample,))
        )
    total = sum(kept.values())
    del out
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return total
