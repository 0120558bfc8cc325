"""Where and when a figure was measured, and the CSV it goes to."""

import csv
import datetime
import pathlib
import platform

import torch

RESULTS = pathlib.Path(__file__).parent / "results"


def machine() -> str:
    """The GPU's name, or the processor's and its number of cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = names[0].strip() if names else name
    return f"{name}, {torch.get_num_threads()} cores"


def write_rows(question: str, rows: list[dict], path: str | None = None) -> pathlib.Path:
    """Writes `rows`, with machine, torch and date in front, to `path` or results/QUESTION_MACHINE_TORCH_DATE.csv."""
    where = {"machine": machine(), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    place = "_".join("".join(c if c.isalnum() or c == "." else "-" for c in v.lower()) for v in where.values())
    path = pathlib.Path(path) if path else RESULTS / f"{question}_{place}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*where, *rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(where | row for row in rows)
    print(f"wrote {path}")
    return path
