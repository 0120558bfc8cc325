"""Writes the tables of README.md from the newest CSV of each question under results/.

python -m benchmarks.render            writes them
python -m benchmarks.render --check    exits 1 if README.md does not hold just these tables
"""

import csv
import pathlib
import re
import sys

from benchmarks.table import RESULTS

README = pathlib.Path(__file__).parents[1] / "README.md"


def newest(question: str) -> tuple[str, list[dict]]:
    """The file name and the rows of the latest measurement."""
    files = sorted(RESULTS.glob(f"{question}_*.csv"), key=lambda f: (f.stem.rsplit("_", 1)[-1], f.name))
    if not files:
        raise SystemExit(f"no results for {question!r}; run python -m benchmarks.{question.replace('-', '_')}")
    with open(files[-1], newline="") as file:
        return files[-1].name, list(csv.DictReader(file))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mb(nbytes: str) -> str:
    return f"{int(nbytes) / 1e6:.1f} MB"


def memory(rows):
    header = ["forward + backward", "precision", "step memory", "less by", "time"]
    body = [
        [r["variant"], r["precision"], mb(r["step_bytes"]), f"{float(r['bytes_ratio']):.1f}x", f"{r['time_ratio']}x"]
        for r in rows
    ]
    note = f"Batch of {rows[0]['batch_size']}, {rows[0]['img_size']} pixels; above weights, gradients and batch."
    return table(header, body) + f"\n\n{note}"


def depth(rows):
    header = ["layers", "reversible", "stored", "gradients equal to the bit"]
    body = [
        [r["depth"], mb(r["reversible_bytes"]), mb(r["stored_bytes"]), f"{r['equal_gradients']} of {r['parameters']}"]
        for r in rows
    ]
    first = rows[0]
    shape = f"batch of {first['batch_size']}, {first['img_size']} pixels"
    note = f"lean_vit_tiny with dropout, {first['precision']}, {shape}."
    return table(header, body) + f"\n\n{note}"


def main_job(rows):
    header = ["run", "accuracy", "time", "samples/s", "peak", "predicted", "off by"]
    body = []
    for r in rows:
        peak, predicted = int(r["peak_bytes"]), int(r["predicted_peak_bytes"])
        accuracy, rate = float(r["val_accuracy"]), float(r["samples_per_s"])
        off = f"{predicted / peak - 1:+.2%}"
        body.append([r["arch"], f"{accuracy:.1%}", f"{r['seconds']} s", f"{rate:.0f}", mb(peak), mb(predicted), off])
    return table(header, body)


TABLES = {"memory": memory, "depth": depth, "main-job": main_job}


def rendered(text: str) -> str:
    for question, render in TABLES.items():
        name, rows = newest(question)
        where = f"Measured on {rows[0]['machine']}, torch {rows[0]['torch']}, {rows[0]['date']}: "
        source = f"{where}[{name}](benchmarks/results/{name}), by `python -m benchmarks.{question.replace('-', '_')}`."
        block = f"<!-- table {question} -->\n{render(rows)}\n\n{source}\n<!-- end -->"
        places = re.findall(rf"<!-- table {question} -->.*?<!-- end -->", text, flags=re.DOTALL)
        if len(places) != 1:
            raise SystemExit(f"README.md has {len(places)} places for the table {question!r}; it needs one")
        text = text.replace(places[0], block)
    return text


def main(arguments: list[str]) -> int:
    text = README.read_text()
    new = rendered(text)
    if "--check" in arguments:
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
