"""What does fine-tuning by an adapter hold, how fast is it, and how large are its files, beside training everything?

    python -m benchmarks.adapters                                      # what README.md shows, in about 20 minutes
    python -m benchmarks.adapters --arch resnet50 --batch_size 32 --precision bf16

Bytes: the most that a forward and backward hold above weights, gradients and batch, and AdamW's state. Seconds: a step
with AdamW, medians of rounds in which a method and full fine-tuning take turns. Every method has the layers that it
would choose by itself, PEFT's all linear layers and convolutions without groups that they take.
"""

import argparse
import itertools
import pathlib
import statistics
import tempfile
import time

import peft
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.memory import DTYPES, make_step, step_bytes
from benchmarks.table import write_rows
from lean_arch import adapters
from lean_arch.adapters.targets import find_layers

ARCHS = ["vit_base_patch16_224", "resnet50", "convnext_tiny"]
FIGURES = ("status", "trained", "step_bytes", "optimizer_bytes", "bytes_ratio", "seconds", "time_ratio", "file_bytes")


def full(model):
    return model, lambda folder: save_file(model.state_dict(), folder / "model.safetensors")


def ours(method, **options):
    def attach(model):
        adapters.attach(model, method, name="task", **options)
        return model, lambda folder: adapters.save(model, "task", folder / "task")

    return attach


def of_peft(config, *kinds, **options):
    """PEFT's method on all layers of the kinds that it takes, without groups. Its model card is no part of an adapter.

    Raises ValueError where those hold less than half of the weights: that would be another adapter.
    """

    def attach(model):
        layers = find_layers(model, "layers")
        taken = [layer for layer in layers if isinstance(layer.module, kinds) and layer.groups == 1]
        if 2 * sum(layer.weight.numel() for layer in taken) < sum(layer.weight.numel() for layer in layers):
            names = " and ".join(f"nn.{kind.__name__}" for kind in kinds)
            raise ValueError(f"takes {names} only: {len(taken)} of {len(layers)} layers")
        wrapped = peft.get_peft_model(model, config(target_modules=[layer.name for layer in taken], **options))

        def save(folder):
            wrapped.save_pretrained(folder, save_embedding_layers=False)
            (folder / "README.md").unlink()

        return wrapped, save

    return attach


METHODS = {
    "full fine-tuning": full,
    "PEFT LoRA, rank 8": of_peft(peft.LoraConfig, nn.Linear, nn.Conv2d, r=8, lora_alpha=8),
    "PEFT SHiRA, rank 8": of_peft(peft.ShiraConfig, nn.Linear, r=8),
    "lora, rank 8": ours("lora", rank=8),
    "sparse, 1% unstructured": ours("sparse", structure="unstructured"),
    "sparse, 1% of columns": ours("sparse"),
    "sparse, 1% of columns, compressed": ours("sparse", activations="compressed"),
    "bias": ours("bias"),
    "ladder": ours("ladder"),
}


def build(arch, device, method):
    """(model in training mode, function that saves what was trained into a folder)."""
    torch.manual_seed(0)
    model, save = METHODS[method](timm.create_model(arch, num_classes=100))
    return model.to(device).train(), save


def training_step(model, optimizer, forward_backward):
    def step():
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def state_bytes(optimizer):
    return sum(state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))


def file_bytes(save):
    with tempfile.TemporaryDirectory() as folder:
        save(pathlib.Path(folder))
        return sum(file.stat().st_size for file in pathlib.Path(folder).rglob("*") if file.is_file())


def prepare(model, images, labels, precision):
    """(a training step that has run once, figures of its memory)."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    forward_backward = make_step(model, images, labels, precision)
    held = step_bytes(forward_backward, model, images, labels)["step_bytes"]
    step = training_step(model, optimizer, forward_backward)
    step()
    return step, {"step_bytes": held, "optimizer_bytes": state_bytes(optimizer)}


def compare(arch, batch_size, img_size, precision, rounds, device):
    """One row a method; ratios are to full fine-tuning."""
    images = torch.randn(batch_size, 3, img_size, img_size, device=device)
    labels = torch.randint(100, (batch_size,), device=device)
    model, _ = build(arch, device, "full fine-tuning")
    whole, first = prepare(model, images, labels, precision)
    for method in METHODS:
        row = {"arch": arch, "method": method, "batch_size": batch_size, "img_size": img_size, "precision": precision}
        row |= dict.fromkeys(FIGURES)
        try:
            model, save = build(arch, device, method)
            step, held = prepare(model, images, labels, precision)
        except (ValueError, RuntimeError) as error:
            yield row | {"status": reason(error)}
            continue
        mine, theirs = [], []
        for _ in range(rounds):
            for run, seconds in ((step, mine), (whole, theirs)):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
        took = statistics.median(mine)
        row |= held | {"status": "measured", "seconds": round(took, 3), "file_bytes": file_bytes(save)}
        row["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        row["bytes_ratio"] = round(held["step_bytes"] / first["step_bytes"], 3)
        row["time_ratio"] = round(statistics.median(a / b for a, b in zip(mine, theirs)), 2)
        yield row


def reason(error):
    """Of a method that does not take a model, in a few words."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return "out of memory"
    return " ".join(str(error).split())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=ARCHS, help="names of timm's")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--img_size", type=int, default=224)
    parser.add_argument("--precision", choices=DTYPES, nargs="+", default=["fp32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", help="default: a name made of machine, torch and date, under benchmarks/results/")
    args = parser.parse_args()
    rows = []
    for arch, precision in itertools.product(args.arch, args.precision):
        for row in compare(arch, args.batch_size, args.img_size, precision, args.rounds, args.device):
            print(row, flush=True)
            rows.append(row)
        write_rows("adapters", rows, args.csv)  # what is measured stays


if __name__ == "__main__":
    main()
