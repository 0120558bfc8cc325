"""Train several architectures, each in a process of its own on the same batches, and set their costs side by side."""

import csv
import dataclasses
import io
import pathlib
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from lean_arch.memory import format_bytes
from lean_arch.memory.ledger import CATEGORIES
from lean_arch.models import check_name
from lean_arch.registry import SEQUENCE_MODELS
from lean_arch.training import state
from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import digits_size

FIGURES = ("params", "peak_bytes", *CATEGORIES, "samples_per_s", "val_accuracy")
CHANGES = ("peak_change", "speed_change", "accuracy_change")
HEADINGS = ("arch", "parameters", "peak", *CATEGORIES, "samples/s", "val accuracy")
HEADINGS += tuple(name.replace("_", " ") for name in CHANGES)


def compare(config: TrainConfig) -> list[dict]:
    """Trains every arch of `config.compare` and writes comparison.csv, .md and .png beside their run folders.

    Returns a row an arch: its figures and their change against the first (peak and speed as a share, accuracy as a
    difference), or only `ended`, the exit status, for one that did not get through. Raises InputError.
    """
    config.check()
    for arch in config.compare:
        try:
            check_name(arch)
        except ValueError as error:
            raise InputError(str(error)) from error
    config = at_one_size(config)
    folder = state.free_folder(config.output, pathlib.Path("runs/compare"), "comparison.csv")
    rows = []
    for arch in config.compare:
        command = [sys.executable, "-m", "lean_arch.cli", "train", *config.to_arguments(), f"--arch={arch}"]
        done = subprocess.run([*command, f"--output={folder / arch}"])
        if done.returncode == 2:
            raise InputError(f"compare stops at {arch}, for the reason above")
        rows.append(row_of(arch, folder / arch, done.returncode))
    for row in rows:
        add_changes(row, rows[0])
    console = Console()
    console.print(table(rows))
    state.write_whole(folder / "comparison.csv", as_csv(rows))
    state.write_whole(folder / "comparison.md", as_markdown(rows))
    state.write_whole(folder / "comparison.png", as_png(rows))
    console.print(f"written to {folder}")
    return rows


def at_one_size(config: TrainConfig) -> TrainConfig:
    """With the largest of the sizes at which its archs see digits by default: or their batches would differ."""
    of_digits = config.data in (None, "digits") and not any(arch in SEQUENCE_MODELS for arch in config.compare)
    if not of_digits or config.img_size is not None:
        return config
    return dataclasses.replace(config, img_size=max(digits_size(arch) for arch in config.compare))


def row_of(arch: str, folder: pathlib.Path, status: int) -> dict:
    if status:
        return {"arch": arch, "ended": status}
    summary = state.read_json(folder / "summary.json")
    summary |= summary["memory"]
    return {"arch": arch, "ended": 0} | {name: summary[name] for name in FIGURES}


def add_changes(row: dict, first: dict) -> None:
    if row["ended"] == 0 == first["ended"]:
        row["peak_change"] = row["peak_bytes"] / first["peak_bytes"] - 1
        row["speed_change"] = row["samples_per_s"] / first["samples_per_s"] - 1
        row["accuracy_change"] = row["val_accuracy"] - first["val_accuracy"]


def as_text(row: dict) -> list[str]:
    """The cells of a row, for people."""
    if row["ended"]:
        return [row["arch"], f"ended in {row['ended']}", *[""] * (len(HEADINGS) - 2)]
    sizes = [format_bytes(row[name]) for name in ("peak_bytes", *CATEGORIES)]
    changes = [f"{row[name]:+.1%}" if name in row else "" for name in CHANGES]
    return [
        row["arch"],
        f"{row['params'] / 1e6:.2f} M",
        *sizes,
        f"{row['samples_per_s']:.1f}",
        f"{row['val_accuracy']:.2%}",
        *changes,
    ]


def table(rows: list[dict]) -> Table:
    """Figures down, archs across: that fits a terminal."""
    columns = [as_text(row) for row in rows]
    result = Table("", title="What each costs (changes against the first)")
    for column in columns:
        result.add_column(column[0], justify="right", overflow="fold")
    for number, heading in enumerate(HEADINGS[1:], start=1):
        result.add_row(heading, *(column[number] for column in columns))
    return result


def as_csv(rows: list[dict]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, ("arch", "ended", *FIGURES, *CHANGES), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def as_markdown(rows: list[dict]) -> str:
    lines = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)], *(as_text(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_png(rows: list[dict]) -> bytes:
    """Two bars an arch: peak memory stacked by category, and speed."""
    from matplotlib.figure import Figure  # takes a second that only a comparison should cost

    rows = [row for row in rows if row["ended"] == 0]
    names = [row["arch"] for row in rows]
    figure = Figure(figsize=(11, 1.5 + 0.5 * len(rows)), layout="constrained")
    memory, speed = figure.subplots(1, 2, sharey=True)
    left = [0.0] * len(rows)
    for category in CATEGORIES:
        sizes = [row[category] / 2**20 for row in rows]
        memory.barh(names, sizes, left=left, label=category)
        left = [a + b for a, b in zip(left, sizes)]
    speed.barh(names, [row["samples_per_s"] for row in rows], color="gray")
    memory.set_xlabel("peak memory, MiB")
    memory.legend(fontsize="small")
    memory.invert_yaxis()
    speed.set_xlabel("samples/s")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()
