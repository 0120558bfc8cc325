"""What does a training step of an architecture hold, beside its textbook twin from timm?

    python -m benchmarks.memory                                        # what README.md shows, in about 15 minutes
    python -m benchmarks.memory --arch 'lean_*' --against timm --img_size 128 224 384 512

Bytes: the most that a forward and backward hold above weights, gradients and batch, which exist before, and what all
of it is at that moment; from the allocator's own events. Seconds: medians of rounds in which the variants take turns.
A row that wants more memory than there is says so.
"""

import argparse
import fnmatch
import itertools
import statistics
import time

import timm
import torch

import lean_arch
from benchmarks.table import write_rows
from lean_arch.memory import measure
from lean_arch.memory.ledger import CATEGORIES

TWINS = {  # of the same sizes in timm, where there is one
    "lean_vit_tiny": "vit_tiny_patch16_224",
    "lean_vit_small": "vit_small_patch16_224",
    "lean_vit_base": "vit_base_patch16_224",
    "lean_vit_large": "vit_large_patch16_224",
    "lean_mobilenetv1": "mobilenetv1_100",
    "lean_mobilenetv2": "mobilenetv2_100",
    "lean_mobilenetv3_small": "mobilenetv3_small_100",
    "lean_mobilenetv3_large": "mobilenetv3_large_100",
    "lean_mobilenetv4_conv_small": "mobilenetv4_conv_small",
    **{f"lean_efficientnet_b{n}": f"efficientnet_b{n}" for n in range(5)},
    **{f"lean_convnext_{size}": f"convnext_{size}" for size in ("atto", "tiny", "small", "base")},
    "lean_revnet": None,
}
ARCHS = ["lean_vit_small", "lean_mobilenetv[12]", "lean_mobilenetv*_large", "*_b0", "lean_convnext_tiny", "lean_revnet"]
FIGURES = ("status", "step_bytes", *CATEGORIES, "bytes_ratio", "seconds", "samples_per_s", "time_ratio")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_step(model, images, labels, precision):
    def step():
        with torch.autocast(images.device.type, DTYPES[precision], enabled=precision != "fp32"):
            logits = model(images)
        torch.nn.functional.cross_entropy(logits.float(), labels).backward()
        if images.is_cuda:
            torch.cuda.synchronize()

    return step


def step_bytes(step, model, images, labels):
    """The most that `step` holds above weights, gradients and batch, and all that is held then by category."""
    step()  # gradients exist from here on
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *gradients, images, labels))
    report = measure(step, model, images, labels)
    return {"step_bytes": report.peak_bytes - held, **report.by_category}


def variants(arch, img_size, twin, **options):
    """name -> model in training mode."""
    if arch.startswith("lean_vit"):
        options["img_size"] = img_size
    models = {}
    if twin:
        models = {name: timm.create_model(twin, **options) for name in (twin, f"{twin} checkpointed")}
        models[f"{twin} checkpointed"].set_grad_checkpointing()
    models[arch] = lean_arch.create_model(arch, **options)
    if hasattr(models[arch], "set_reversible"):
        models[f"{arch} stored"] = lean_arch.create_model(arch, **options)
        models[f"{arch} stored"].set_reversible(False)
    return {name: model.train() for name, model in models.items()}


def compare(arch, batch_size, img_size, precision, rounds, device, twin):
    """One row a variant; ratios are to the first, timm's plain twin if there is one."""
    models = variants(arch, img_size, twin, num_classes=100)
    images = torch.randn(batch_size, 3, img_size, img_size, device=device)
    labels = torch.randint(100, (batch_size,), device=device)
    steps, held, seconds = {}, {}, {name: [] for name in models}
    for name, model in models.items():
        step = make_step(model.to(device), images, labels, precision)
        try:
            held[name] = step_bytes(step, model, images, labels)
            steps[name] = step
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    first = next(iter(models))
    for name in models:
        row = {"arch": arch, "variant": name, "batch_size": batch_size, "img_size": img_size, "precision": precision}
        row |= dict.fromkeys(FIGURES)
        row["status"] = "measured" if name in steps else "out of memory"
        if name in steps:
            took = statistics.median(seconds[name])
            row |= held[name] | {"seconds": round(took, 3), "samples_per_s": round(batch_size / took, 1)}
        if name in steps and first in steps:
            times = [mine / theirs for mine, theirs in zip(seconds[name], seconds[first])]
            row["bytes_ratio"] = round(held[first]["step_bytes"] / held[name]["step_bytes"], 2)
            row["time_ratio"] = round(statistics.median(times), 2)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=ARCHS, help="shell patterns")
    parser.add_argument("--against", choices=["timm", "none"], default="timm", help="whose twins are beside")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--img_size", type=int, nargs="+", default=[128, 224, 512])
    parser.add_argument("--precision", choices=DTYPES, nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", help="default: a name made of machine, torch and date, under benchmarks/results/")
    args = parser.parse_args()
    archs = [a for a in TWINS if any(fnmatch.fnmatch(a, pattern) for pattern in args.arch)]
    if not archs:
        parser.error(f"arch {' '.join(args.arch)!r} matches none of {', '.join(TWINS)}")
    rows = []
    for arch, size, precision in itertools.product(archs, args.img_size, args.precision):
        twin = TWINS[arch] if args.against == "timm" else None
        for row in compare(arch, args.batch_size, size, precision, args.rounds, args.device, twin):
            print(row, flush=True)
            rows.append(row)
        write_rows("memory", rows, args.csv)  # what is measured stays


if __name__ == "__main__":
    main()
