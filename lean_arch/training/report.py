"""What a run says while it goes and when it is over: progress, and the table of what it cost."""

import pathlib

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from lean_arch.memory import Report, format_bytes


def say_recipe(console: Console, recipe, folder: pathlib.Path | None) -> None:
    """One line on what will run, one on what memory it will take. `folder` None: nothing will be written."""
    config, data = recipe.config, recipe.data
    pieces = f"{config.batch_size} {data.unit} a step"
    if recipe.accumulation_steps > 1:
        pieces += f" in {recipe.accumulation_steps} micro-batches of {recipe.micro_batch_size}"
    trained = f" ({recipe.trainable_parameters:,} trained by {config.adapter})" if config.adapter else ""
    console.print(
        f"{config.arch}: {recipe.parameters / 1e6:.2f} M parameters{trained}, {config.data} at {data.size}, "
        f"{recipe.total_steps} steps, {pieces}, {config.optimizer}, {recipe.precision} "
        f"on {recipe.accelerator.device.type}, checkpointing {recipe.checkpoint}",
        soft_wrap=True,
    )
    if recipe.new:
        console.print(f"{', '.join(recipe.new)}: new, for {config.init_from} is of other classes", soft_wrap=True)
    if config.val_windows and len(data.val) < config.val_windows:
        console.print(
            f"val_windows {config.val_windows} is more than the text holds: validation takes all its {len(data.val)}",
            soft_wrap=True,
        )
    where = f", to {folder}" if folder else ""
    console.print(f"predicted peak {format_bytes(recipe.predicted.peak_bytes)}{where}", soft_wrap=True)


def cost_table(measured: dict[str, int] | None, predicted: Report, plain: Report | None) -> Table:
    """Peak memory by category: predicted, measured and, for an arch with lean parts, predicted without them."""
    columns = {"predicted": predicted.by_category}
    if measured is not None:
        columns["measured"] = measured
    if plain is not None:
        columns["without lean parts (predicted)"] = plain.by_category
    table = Table("peak memory", title="What a step costs")
    for name in columns:
        table.add_column(name, justify="right")
    for category in predicted.by_category:
        table.add_row(category, *(format_bytes(column[category]) for column in columns.values()))
    table.add_section()
    table.add_row("total", *(format_bytes(sum(column.values())) for column in columns.values()))
    return table


class Progress:
    """A bar on a terminal, and one line a validation anywhere."""

    def __init__(self, run):
        self.run = run
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=run.console,
            refresh_per_second=2,
            transient=True,
            disable=not run.console.is_terminal,
        )
        self.task = self.bar.add_task(run.config.arch, total=run.total, completed=run.step, facts="")

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *exception):
        self.bar.stop()

    def step(self, loss: float, rate: float) -> None:
        facts = f"loss {loss:.4f}  {self.run.recipe.data.speed(rate)}  peak {format_bytes(self.run.peak_bytes)}"
        self.bar.update(self.task, completed=self.run.step, facts=facts)

    def pause(self, loss: float, rate: float) -> None:
        run = self.run
        at = run.step / run.recipe.steps_per_epoch
        speed = run.recipe.data.speed(rate)
        run.console.print(
            f"epoch {at:.4g}  step {run.step}/{run.total}  loss {loss:.4f}  val loss {run.val['val_loss']:.4f}  "
            f"accuracy {run.val['val_accuracy']:.2%}  {speed}  peak {format_bytes(run.peak_bytes)}",
            soft_wrap=True,
            highlight=False,
        )
