"""What do the projection to a vocabulary and its loss hold and take, beside F.cross_entropy(F.linear())?

    python -m benchmarks.linear_cross_entropy

Bytes: the most that a forward and backward hold above x, weight and their gradients, which exist before; from the
allocator's own events. Seconds: medians of rounds in which the two take turns.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from benchmarks.table import write_rows
from lean_arch.memory import measure
from lean_arch.ops import linear_cross_entropy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = ("4096x256x256", "1024x512x8192", "2048x256x16384", "1024x96x50257")


def plain(x, weight, target):
    return F.cross_entropy(F.linear(x, weight).float(), target)


def compare(tokens, size, classes, dtype, rounds, device):
    """A row for the plain loss and one for ours; ratios are to the plain."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, size, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(classes, size, generator=generator).mul(size**-0.5).to(device, dtype).requires_grad_()
    target = torch.randint(classes, (tokens,), generator=generator).to(device)

    def step(loss):
        loss(x, weight, target).backward()
        if x.is_cuda:
            torch.cuda.synchronize()

    losses = {"plain": plain, "linear_cross_entropy": linear_cross_entropy}
    held, seconds = {}, {name: [] for name in losses}
    for name, loss in losses.items():
        step(loss)  # gradients exist from here on
        tensors = (x, weight, x.grad, weight.grad, target)
        used = measure(lambda: step(loss), *tensors).peak_bytes  # noqa: B023
        held[name] = used - sum(t.nbytes for t in tensors)
    for _ in range(rounds):
        for name, loss in losses.items():
            start = time.perf_counter()
            step(loss)
            seconds[name].append(time.perf_counter() - start)
    for name in losses:
        times = [mine / theirs for mine, theirs in zip(seconds[name], seconds["plain"])]
        yield {
            "variant": name,
            "tokens": tokens,
            "size": size,
            "classes": classes,
            "dtype": next(known for known, value in DTYPES.items() if value == dtype),
            "step_bytes": held[name],
            "bytes_ratio": round(held["plain"] / held[name], 2),
            "seconds": round(statistics.median(seconds[name]), 3),
            "time_ratio": round(statistics.median(times), 2),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="TxDxV", help="tokens, size, classes")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", help="default: a name made of machine, torch and date, under benchmarks/results/")
    args = parser.parse_args()
    rows = []
    for sizes in args.sizes:
        try:
            tokens, size, classes = (int(number) for number in sizes.split("x"))
        except ValueError:
            parser.error(f"sizes {sizes!r} is not three whole numbers, such as {SIZES[0]}")
        for row in compare(tokens, size, classes, DTYPES[args.dtype], args.rounds, args.device):
            print(row, flush=True)
            rows.append(row)
    write_rows("linear-cross-entropy", rows, args.csv)


if __name__ == "__main__":
    main()
