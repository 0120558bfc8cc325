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
        raise SystemExit(f"no results for {question!r}; run python -m benchmarks.{command(question)}")
    with open(files[-1], newline="") as file:
        return files[-1].name, list(csv.DictReader(file))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mb(nbytes: str) -> str:
    return f"{int(nbytes) / 1e6:.1f} MB"


SHOWN = "lean_vit_small", "lean_mobilenetv3_large", "lean_efficientnet_b0", "lean_convnext_tiny", "lean_revnet"


def memory(rows):
    header = ["forward + backward"]
    for precision in ("fp32", "bf16"):
        header += [f"{precision}: step memory", "less by", "time"]
    cells = {(r["variant"], r["precision"]): r for r in rows if r["img_size"] == "224" and r["arch"] in SHOWN}
    body = []
    for variant in dict.fromkeys(variant for variant, _ in cells):
        line = [variant]
        for precision in ("fp32", "bf16"):
            r = cells[variant, precision]
            there = r["status"] == "measured"
            line += (
                [mb(r["step_bytes"]), f"{float(r['bytes_ratio']):.1f}x", f"{r['time_ratio']}x"]
                if there
                else [r["status"], "", ""]
            )
        body.append(line)
    note = f"Batch of {rows[0]['batch_size']}, 224 pixels; above weights, gradients and batch."
    return table(header, body) + f"\n\n{note}\n\n{memory_by_size(rows)}"


def memory_by_size(rows):
    """Step memory of the CNNs over image sizes, and of their twins."""
    sizes = list(dict.fromkeys(r["img_size"] for r in rows))
    body = []
    for arch in SHOWN[1:4]:
        mine = [r for r in rows if r["arch"] == arch and r["precision"] == "bf16"]
        for variant in dict.fromkeys(r["variant"] for r in mine):
            of_sizes = [r for r in mine if r["variant"] == variant]
            body.append([variant, *(mb(r["step_bytes"]) if r["step_bytes"] else r["status"] for r in of_sizes)])
    return table(["bf16", *(f"{size} pixels" for size in sizes)], body)


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


def attention(rows):
    lengths = [n for n in (4096, 16384, 65536) if any(int(r["tokens"]) == n for r in rows)]
    header = ["one layer, forward + backward"]
    for n in lengths:
        header += [f"{n // 1024}k tokens", "KB a token"]
    cells = {(r["method"], int(r["tokens"])): r for r in rows}
    body = []
    for method in dict.fromkeys(r["method"] for r in rows):
        line = [method]
        for n in lengths:
            r = cells[method, n]
            there = r["status"] == "measured"
            line += (
                [f"{float(r['seconds']):.2f} s", f"{int(r['bytes_per_token']) / 1e3:.1f}"]
                if there
                else [r["status"], ""]
            )
        body.append(line)
    window, n_hashes = (next(r[name] for r in rows if r[name]) for name in ("window", "n_hashes"))
    note = f"512 channels, 8 heads, fp32; local: {window} keys each side; LSH: {n_hashes} rounds, chunks of 64, causal."
    return table(header, body) + f"\n\n{note}"


def linear_cross_entropy(rows):
    header = ["tokens x channels x classes", "F.cross_entropy(F.linear())", "linear_cross_entropy", "less by", "time"]
    body = []
    for plain, ours in zip(rows[::2], rows[1::2], strict=True):
        size = f"{ours['tokens']} x {ours['size']} x {ours['classes']}"
        less = f"{float(ours['bytes_ratio']):.1f}x"
        body.append([size, mb(plain["step_bytes"]), mb(ours["step_bytes"]), less, f"{ours['time_ratio']}x"])
    return table(header, body) + f"\n\n{rows[0]['dtype']}; above x, weight and their gradients."


def builds(rows):
    header = ["kernel", "builds", "targets", "most registers", "spilled bytes", "shared memory of the limit"]
    body = []
    for kernel in dict.fromkeys(r["kernel"] for r in rows):
        mine = [r for r in rows if r["kernel"] == kernel]
        share = max(int(r["shared_bytes"]) / int(r["shared_limit"]) for r in mine)
        spilled = sum(int(r["spill_bytes"] or 0) for r in mine)
        registers = max(int(r["registers"]) for r in mine)
        targets = len({r["target"] for r in mine})
        body.append([kernel, str(len(mine)), str(targets), str(registers), str(spilled), f"{share:.0%} at most"])
    targets = ", ".join(dict.fromkeys(r["target"] for r in rows))
    dtypes = ", ".join(dict.fromkeys(r["dtype"] for r in rows))
    return table(header, body) + f"\n\nBuilt, not run: {targets}; {dtypes}."


TABLES = {
    "memory": memory,
    "depth": depth,
    "main-job": main_job,
    "attention": attention,
    "linear-cross-entropy": linear_cross_entropy,
    "builds": builds,
}


def command(question: str) -> str:
    return {"builds": "kernels --compile_only"}.get(question, question.replace("-", "_"))


def rendered(text: str) -> str:
    for question, render in TABLES.items():
        name, rows = newest(question)
        where = (
            f"Measured on {rows[0]['machine']}, torch {rows[0]['torch']}, {rows[0]['date']}: "
            if "machine" in rows[0]
            else ""
        )
        source = f"{where}[{name}](benchmarks/results/{name}), by `python -m benchmarks.{command(question)}`."
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
