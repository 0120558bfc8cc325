"""What does attention over long sequences take, beside the libraries people use?

    python -m benchmarks.attention

One layer with its projections of queries, keys and values, forward and backward, over one sequence of 1k to 64k
tokens, on the CPU: time, and the most bytes held above weights, their gradients and the input. Local attention sees
`--window` keys on both sides; LSH attention has chunks of 64. Every row runs in a process of its own that may take
`--limit` GiB; rows that want more are written as such, and so are those that would take longer than `--patience`
seconds a step, going by the row before.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.table import write_rows
from lean_arch.memory import measure

DIM, HEADS = 512, 8
LENGTHS = [2**power for power in range(10, 17)]
OUT_OF_MEMORY, TOO_SLOW = "out of memory", "too slow"


class Projected(torch.nn.Module):
    """`attend(*parts)` of (1, N, DIM), each part (1, HEADS, N, DIM / HEADS)."""

    def __init__(self, attend, parts):
        super().__init__()
        self.attend, self.parts = attend, parts
        self.weight = torch.nn.Linear(DIM, parts * DIM, bias=False)

    def forward(self, x):
        return self.attend(*self.weight(x).unflatten(2, (self.parts, HEADS, -1)).permute(2, 0, 3, 1, 4))


def lean_local(window):
    from lean_arch.ops import sparse_attention
    from lean_arch.ops.patterns import local

    pattern = local(window)
    return Projected(lambda q, k, v: sparse_attention(q, k, v, pattern), 3)


def full(window):
    return Projected(torch.nn.functional.scaled_dot_product_attention, 3)


def longformer(window):
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "attention_window": [2 * window]}
    layer = LongformerSelfAttention(LongformerConfig(**sizes, attention_probs_dropout_prob=0.0), 0)

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            mask = torch.zeros(x.shape[:2])
            masks = {"is_index_masked": mask > 0, "is_index_global_attn": mask > 0, "is_global_attn": False}
            return self.layer(x, attention_mask=mask, **masks)[0]

    return Masked()


def local_attention(window):
    from local_attention import LocalMHA

    return LocalMHA(dim=DIM, dim_head=DIM // HEADS, heads=HEADS, window_size=window, causal=False, prenorm=False)


def lean_lsh(n_hashes):
    from lean_arch.ops import lsh_attention

    return Projected(lambda qk, v: lsh_attention(qk, v, n_hashes=n_hashes, bucket_size=64, causal=True), 2)


def reformer(n_hashes):
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = ReformerConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        attention_head_size=DIM // HEADS,
        num_hashes=n_hashes,
        lsh_attn_chunk_length=64,
        num_buckets=None,
        attn_layers=["lsh"],
        lsh_attention_probs_dropout_prob=0.0,
        is_decoder=True,
    )
    layer = LSHSelfAttention(config)

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)[0]

    return First()


def reformer_pytorch(n_hashes):
    from reformer_pytorch import LSHSelfAttention

    return LSHSelfAttention(dim=DIM, heads=HEADS, bucket_size=64, n_hashes=n_hashes, causal=True, return_attn=False)


METHODS = {  # name -> (kind, maker)
    "lean_arch local": ("local", lean_local),
    "Hugging Face Longformer": ("local", longformer),
    "local-attention": ("local", local_attention),
    "full SDPA": ("full", full),
    "lean_arch LSH": ("LSH", lean_lsh),
    "Hugging Face Reformer": ("LSH", reformer),
    "reformer-pytorch": ("LSH", reformer_pytorch),
}


def one(method, length, window, n_hashes, rounds, limit):
    """Runs in the process of its own: {"step_bytes", "seconds"}, or {"status": "out of memory"}."""
    kind, make = METHODS[method]
    torch.manual_seed(0)
    layer = make(n_hashes if kind == "LSH" else window).train()
    x = torch.randn(1, length, DIM, requires_grad=True)

    def step():
        layer(x).square().mean().backward()

    with open("/proc/self/status") as status:
        held = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + limit, resource.RLIM_INFINITY))
    try:
        step()  # gradients exist from here on; unused projections have none
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        held_tensors = (*layer.parameters(), *layer.buffers(), *gradients, x)
        nbytes = measure(step, layer, x).peak_bytes - sum(t.nbytes for t in held_tensors)
        seconds = []
        while len(seconds) < rounds and sum(seconds) < 10:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        return {"status": OUT_OF_MEMORY}
    return {"status": "measured", "step_bytes": nbytes, "seconds": round(statistics.median(seconds), 3)}


def in_its_own_process(method, length, args):
    command = [sys.executable, "-m", "benchmarks.attention", "--one", method, "--lengths", str(length)]
    for name in ("window", "n_hashes", "rounds", "limit"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode < 0:
        return {"status": OUT_OF_MEMORY}  # the system ended it, or a library that gives up where it gets no memory
    if done.returncode:
        raise RuntimeError(f"{method} over {length} tokens failed: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(args):
    """One row a method and length."""
    for method in args.methods:
        kind, _ = METHODS[method]
        last = None
        for length in sorted(args.lengths):
            if last is None or last["status"] == "measured":
                expected = 0 if last is None else last["seconds"] * (length / last["tokens"]) ** (1 + (kind == "full"))
                slow = expected > args.patience
                found = {"status": TOO_SLOW} if slow else in_its_own_process(method, length, args)
            last = row(method, kind, length, args, found)  # what the shorter one could not do, this one cannot
            yield last


def row(method, kind, length, args, found):
    nbytes = found.get("step_bytes")
    return {
        "method": method,
        "kind": kind,
        "tokens": length,
        "window": args.window if kind == "local" else "",
        "n_hashes": args.n_hashes if kind == "LSH" else "",
        "status": found["status"],
        "step_bytes": "" if nbytes is None else nbytes,
        "bytes_per_token": "" if nbytes is None else round(nbytes / length),
        "seconds": found.get("seconds", ""),
    }


def plot(rows, path):
    """Seconds and bytes a token over the length, of all that could be measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, key, label in zip(panels, ("seconds", "step_bytes"), ("seconds a step", "MiB held by a step")):
        for number, (method, (kind, _)) in enumerate(METHODS.items()):
            mine = [r for r in rows if r["method"] == method and r["status"] == "measured"]
            values = [r[key] / (2**20 if key == "step_bytes" else 1) for r in mine]
            style = {"local": "-", "full": ":", "LSH": "--"}[kind]
            color, width = f"C{number}", 2.5 if method.startswith("lean_arch") else 1.2
            axes.plot([r["tokens"] for r in mine], values, style, color=color, lw=width, marker=".", label=method)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    panels[1].legend(fontsize="small")
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--n_hashes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="timed steps; fewer once they have taken 10 s")
    parser.add_argument("--limit", type=float, default=4, help="GiB that a process may take")
    parser.add_argument("--patience", type=float, default=30, help="seconds a step may take")
    parser.add_argument("--csv", help="default: a name made of machine, torch and date, under benchmarks/results/")
    parser.add_argument("--one", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        (length,) = args.lengths
        print(json.dumps(one(args.one, length, args.window, args.n_hashes, args.rounds, int(args.limit * 2**30))))
        return
    rows = []
    for found in compare(args):
        print(found, flush=True)
        rows.append(found)
    plot(rows, write_rows("attention", rows, args.csv).with_suffix(".png"))


if __name__ == "__main__":
    main()
