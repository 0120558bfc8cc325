"""What does a training step of an architecture hold, beside its textbook twin from timm?

    python -m benchmarks.memory --arch 'lean_vit_*' --batch_size 8 --precision bf16

Bytes: the most that a forward and backward hold above weights, gradients and batch, which exist before; from the
allocator's own events. Seconds: medians of rounds in which the variants take turns.
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

TWINS = {  # of the same sizes in timm
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
}
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
    """The most that `step` holds above weights, gradients and batch."""
    step()  # gradients exist from here on
    gradients = [p.grad for p in model.parameters()]
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *gradients, images, labels))
    return measure(step, model, images, labels).peak_bytes - held


def variants(arch, img_size, **options):
    """name -> model in training mode."""
    twin = TWINS[arch]
    if arch.startswith("lean_vit"):
        options["img_size"] = img_size
    plain, checkpointed = timm.create_model(twin, **options), timm.create_model(twin, **options)
    checkpointed.set_grad_checkpointing()
    models = {twin: plain, f"{twin} checkpointed": checkpointed, arch: lean_arch.create_model(arch, **options)}
    if hasattr(models[arch], "set_reversible"):
        models[f"{arch} stored"] = lean_arch.create_model(arch, **options)
        models[f"{arch} stored"].set_reversible(False)
    return {name: model.train() for name, model in models.items()}


def compare(arch, batch_size, img_size, precision, rounds, device):
    """One row a variant; ratios are to the first, timm's plain twin."""
    models = variants(arch, num_classes=100, img_size=img_size)
    images = torch.randn(batch_size, 3, img_size, img_size, device=device)
    labels = torch.randint(100, (batch_size,), device=device)
    steps, held_bytes, seconds = {}, {}, {name: [] for name in models}
    for name, model in models.items():
        steps[name] = make_step(model.to(device), images, labels, precision)
        held_bytes[name] = step_bytes(steps[name], model, images, labels)
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    first = next(iter(models))
    for name in models:
        times = [mine / theirs for mine, theirs in zip(seconds[name], seconds[first])]
        yield {
            "arch": arch,
            "variant": name,
            "batch_size": batch_size,
            "img_size": img_size,
            "precision": precision,
            "step_bytes": held_bytes[name],
            "bytes_ratio": round(held_bytes[first] / held_bytes[name], 2),
            "seconds": round(statistics.median(seconds[name]), 3),
            "time_ratio": round(statistics.median(times), 2),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="lean_vit_small", help="shell pattern")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--img_size", type=int, nargs="+", default=[224])
    parser.add_argument("--precision", choices=DTYPES, nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", help="default: a name made of machine, torch and date, under benchmarks/results/")
    args = parser.parse_args()
    archs = fnmatch.filter(TWINS, args.arch)
    if not archs:
        parser.error(f"arch {args.arch!r} matches none of {', '.join(TWINS)}")
    rows = []
    for arch, size, precision in itertools.product(archs, args.img_size, args.precision):
        for row in compare(arch, args.batch_size, size, precision, args.rounds, args.device):
            print(row, flush=True)
            rows.append(row)
        write_rows("memory", rows, args.csv)  # what is measured stays, should a later one run out of memory


if __name__ == "__main__":
    main()
