"""What does the main job reach, and was its memory known before?

python -m benchmarks.main_job --arch lean_vit
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.table import write_rows

ROOT = pathlib.Path(__file__).parents[1]


def run(arch: str, *arguments: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, str(ROOT / "train.py"), "--arch", arch, "--output", f"{folder}/run", *arguments]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - start
        summary = json.loads((pathlib.Path(folder) / "run" / "summary.json").read_text())
    columns = ("arch", "steps", "params", "precision", "val_accuracy", "samples_per_s")
    row = {name: summary[name] for name in columns} | {"seconds": round(seconds)}
    row |= {name: summary[name] for name in ("peak_bytes", "predicted_peak_bytes")}
    return row | {f"{name}_bytes": value for name, value in summary["memory"].items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["lean_vit"])
    parser.add_argument("--csv", help="default: a name made of machine, torch and date, under benchmarks/results/")
    args, rest = parser.parse_known_args()
    write_rows("main-job", [run(arch, *rest) for arch in args.arch], args.csv)


if __name__ == "__main__":
    main()
