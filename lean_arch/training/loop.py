"""The training loop: every architecture, any device, one process or many.

What a run is has been settled by `recipe.prepare`; here it is carried out, recorded and, after an interruption, gone
on with to the bit.
"""

import dataclasses
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from rich.console import Console
from torch.utils.data import DataLoader

from lean_arch import adapters
from lean_arch.memory import Report, measure
from lean_arch.models.lean_sequence import IGNORED
from lean_arch.training import report, state
from lean_arch.training.adapter import NAME, final_state
from lean_arch.training.config import CURVE, InputError, TrainConfig
from lean_arch.training.data import Batches, loader
from lean_arch.training.optim import learning_rate, make_optimizer
from lean_arch.training.recipe import Prepared, prepare
from lean_arch.training.step import Step

STEADY = 3  # the step of a process that is measured: the optimizer's state and all lazy set-up are there


def train(config: TrainConfig, console: Console | None = None) -> dict:
    """Trains as `config` says and returns what `summary.json` holds.

    Raises InputError for what cannot be done, before anything is written, and when the loss stops being a number.
    """
    console = console or Console()
    folder, found = choose_folder(config)
    recipe = prepare(config)
    if not recipe.accelerator.is_main_process:
        console = Console(quiet=True)
    report.say_recipe(console, recipe, folder)
    run = Run(recipe, folder, console)
    if found:
        run.resume(found)
    elif config.resume:
        console.print(f"--resume: {folder} holds no checkpoint, so the run starts anew")
    return run.carry_out()


def choose_folder(config: TrainConfig) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """Where to write, and the checkpoints there to go on from. A run is never written over."""
    default = pathlib.Path("runs") / str(config.arch)
    if not config.resume:
        return state.free_folder(config.output, default, "config.yaml"), []
    taken = [default, *state.taken_folders(default, "config.yaml")]
    folder = state.named_folder(config.output) if config.output else taken[-1]
    return folder, state.checkpoints(folder)


class Run:
    """The state of a run: its step, its model and optimizer, what was measured."""

    def __init__(self, recipe: Prepared, folder: pathlib.Path, console: Console):
        self.recipe, self.folder, self.console = recipe, folder, console
        self.config, self.accelerator = recipe.config, recipe.accelerator
        self.step = self.first = 0
        self.total = recipe.total_steps
        self.last = min(self.total, self.config.stop_after or self.total)
        self.raw_model = recipe.model.to(self.accelerator.device).train()
        self.optimizer = make_optimizer(self.config, self.raw_model)
        set_seed(self.config.seed, device_specific=True)
        self.measured: Report | None = None
        self.val_loader: DataLoader | None = None
        self.val: dict[str, float] = {}
        self.seconds = []  # of each step of this process

    @property
    def measured_steps(self) -> tuple[int, int]:
        """Which steps of this process, counted from 0, run under the profiler: the first, and a steady one."""
        return 0, min(STEADY, self.last - self.first) - 1

    def resume(self, found: list[pathlib.Path]) -> None:
        """Puts back the newest of the checkpoints `found`, oldest first, that can be read."""
        *older, checkpoint = found
        try:
            self._put_back(checkpoint)
        except state.Damaged as error:
            if not older:
                raise InputError(f"{error}, and there is none before it; start anew in another folder") from error
            if self.accelerator.is_main_process:
                print(f"{error}; it goes on from {older[-1].name}, the one before", file=sys.stderr)
            self.resume(older)

    def _put_back(self, checkpoint: pathlib.Path) -> None:
        facts = state.read_facts(checkpoint)
        with state.refusing_damage(checkpoint):
            was, done = {name: facts["config"][name] for name in CURVE}, int(facts["step"])
        for name, then in was.items():
            now = getattr(self.config, name)
            if then != now:
                raise InputError(
                    f"{name} {now} cannot go on with the run in {self.folder}, which has {then}; give {then}"
                )
        if facts.get("base") != self.recipe.base:
            raise InputError(f"{checkpoint} stands on other weights than those under the adapter now; put them back")
        if facts.get("digest") not in (None, self.recipe.data.digest):
            data = f"data {self.config.data!r}"
            raise InputError(f"{data} holds another text than when {checkpoint} was written; put that one back")
        state.load_checkpoint(checkpoint, facts, self.raw_model, self.optimizer, self.accelerator)
        self._say_what_rounds_otherwise(facts.get("rounding", {}))
        self.step = self.first = done
        self.console.print(f"going on after step {self.step} of {self.total}")

    def _say_what_rounds_otherwise(self, was: dict) -> None:
        for name, then in was.items():
            now = getattr(self.recipe, name)
            if now != then:
                self.console.print(f"{name} was {then} and is now {now}: the curve goes on to rounding, not to the bit")

    def carry_out(self) -> dict:
        if self.step >= self.last:
            if not (self.folder / "summary.json").exists():
                raise InputError(f"stop_after {self.last} is no later than step {self.step}, where {self.folder} is")
            self.console.print(f"nothing left to do: {self.folder} is at step {self.step} of {self.total}")
            return state.read_json(self.folder / "summary.json")
        main = self.accelerator.is_main_process
        if main:
            self.folder.mkdir(parents=True, exist_ok=True)
            state.write_whole(self.folder / "config.yaml", self.config.to_yaml())
        model, optimizer = self.accelerator.prepare(self.raw_model, self.optimizer)
        step = self.recipe.step(model, optimizer, self.accelerator, self.recipe.micro_batch_size)
        pause = self.recipe.validate_every
        with state.Metrics(self.folder / "metrics.csv", self.step, main) as metrics, report.Progress(self) as progress:
            before = time.perf_counter()
            for inputs, targets in self.stream():
                loss, lr = self.one_step(step, optimizer, inputs, targets)
                self.seconds.append(time.perf_counter() - before)
                rate = self.config.batch_size / self.seconds[-1]
                metrics.add(self.step, loss, lr, rate, self.peak_bytes, step.micro_batch_size)
                progress.step(loss, rate)
                if self.step % pause == 0 or self.step == self.last:
                    self.val = self.validate()
                    progress.pause(loss, rate)
                if self.step == self.last:
                    break
                if self.step % (self.config.checkpoint_every or pause) == 0:
                    self.save()
                before = time.perf_counter()
        return self.finish()

    def stream(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This process's share of the batches from the present step on, epoch after epoch."""
        batches = self.batches(self.recipe.data.train, self.config.batch_size, self.config.seed)
        loading = loader(self.recipe.data.train, batches, self.config)
        while True:
            batches.epoch, batches.start = divmod(self.step, len(batches))
            yield from loading

    def batches(self, dataset, batch_size: int, seed: int | None) -> Batches:
        return Batches(len(dataset), batch_size, seed, self.accelerator.process_index, self.accelerator.num_processes)

    def one_step(self, step: Step, optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """(mean loss of the batch, learning rate)."""
        device = self.accelerator.device
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        lr = learning_rate(self.config, self.step + 1, self.total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        losses = []

        def go():
            losses.append(step(inputs, targets))

        if len(self.seconds) in self.measured_steps:
            self.measured = measure(go, self.raw_model, self.optimizer, inputs, targets)
        else:
            go()
        loss = self.accelerator.reduce(losses[0], "sum").item()
        self.step += 1
        if not math.isfinite(loss):
            lr = self.config.lr
            raise InputError(f"lr {lr} drove the loss to {loss} at step {self.step}; a smaller one would work")
        return loss, lr

    @property
    def peak_bytes(self) -> int:
        """The latest measured; on a GPU its allocator's own peak, which sees every step."""
        device = self.accelerator.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else self.measured.peak_bytes

    @property
    def samples_per_s(self) -> float:
        """Median over the steps that were neither the first nor under the profiler, where there are others."""
        steady = [s for number, s in enumerate(self.seconds) if number not in self.measured_steps]
        return self.config.batch_size / statistics.median(steady or self.seconds[-1:])

    def validate(self) -> dict[str, float]:
        """{"val_loss": mean cross-entropy, "val_accuracy": share of top-1 hits} over the targets of the validation."""
        model, accelerator = self.raw_model.eval(), self.accelerator
        if self.val_loader is None:
            data = self.recipe.data.val
            batches = self.batches(data, self.recipe.micro_batch_size * accelerator.num_processes, None)
            self.val_loader = loader(data, batches, self.config)
        totals = torch.zeros(3, device=accelerator.device)  # loss, hits, targets
        with torch.inference_mode(), accelerator.autocast():
            for inputs, targets in self.val_loader:
                inputs, targets = inputs.to(accelerator.device), targets.to(accelerator.device).flatten()
                logits = model(inputs).float().flatten(0, -2)  # (T, classes), targets (T,)
                totals[0] += F.cross_entropy(logits, targets, reduction="sum")
                totals[1] += (logits.argmax(1) == targets).sum()
                totals[2] += (targets != IGNORED).sum()
        model.train()
        loss, hits, count = accelerator.reduce(totals, "sum").tolist()
        return {"val_loss": loss / count, "val_accuracy": hits / count}

    def save(self) -> None:
        rounding = {name: getattr(self.recipe, name) for name in ("micro_batch_size", "checkpoint")}
        config, base = dataclasses.asdict(self.config), self.recipe.base
        facts = {"config": config, "rounding": rounding, "digest": self.recipe.data.digest, "base": base}
        state.save_checkpoint(self.folder, self.step, self.raw_model, self.optimizer, self.accelerator, facts)

    def finish(self) -> dict:
        summary = self.summary()
        if self.accelerator.is_main_process:
            state.write_tensors(self.folder / "model.safetensors", final_state(self.raw_model))
            if self.config.adapter is not None:
                adapters.save(self.raw_model, NAME, self.folder / "adapter")
            state.write_json(self.folder / "summary.json", summary)
        self.save()  # last, so that a checkpoint of the last step means that the run is complete
        plain = self.recipe.predict_plain() if self.recipe.has_lean_parts else None
        self.console.print(report.cost_table(summary["memory"], self.recipe.predicted, plain))
        self.console.print(f"validation accuracy {self.val['val_accuracy']:.2%}, written to {self.folder}")
        return summary

    def summary(self) -> dict:
        recipe, config = self.recipe, self.config
        memory = dict(self.measured.by_category)
        memory["other"] += self.peak_bytes - self.measured.peak_bytes
        return {
            "arch": config.arch,
            "steps": self.step,
            "params": recipe.parameters,
            "trainable_params": recipe.trainable_parameters,
            "adapter": config.adapter,
            **self.val,
            "samples_per_s": self.samples_per_s,
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": recipe.predicted.peak_bytes,
            "micro_batch_size": recipe.micro_batch_size,
            "accumulation_steps": recipe.accumulation_steps,
            "precision": recipe.precision,
            "checkpoint": recipe.checkpoint,
            "optimizer": config.optimizer,
            "memory": memory,
            "data": config.data,
            **recipe.data.facts,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "device": self.accelerator.device.type,
            "torch": torch.__version__,
        }
