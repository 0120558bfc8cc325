"""What does one more reversible layer cost, and are its gradients still exact?

    python -m benchmarks.depth

For each depth: the most that a forward and backward of lean_vit_tiny hold above weights, gradients and batch, as it is
and with activations stored, and how many of its parameters get the same gradient, bit for bit, both ways.
"""

import argparse

import torch

import lean_arch
from benchmarks.memory import DTYPES, make_step, step_bytes
from benchmarks.table import write_rows


def compare(depth, batch_size, img_size, precision):
    torch.manual_seed(0)
    options = {"num_classes": 100, "img_size": img_size, "drop_path_rate": 0.2, "proj_drop_rate": 0.1}
    model = lean_arch.create_model("lean_vit_tiny", depth=depth, **options).train()
    images, labels = torch.randn(batch_size, 3, img_size, img_size), torch.randint(100, (batch_size,))
    step = make_step(model, images, labels, precision)
    nbytes, gradients = [], []
    for reversible in (True, False):
        model.set_reversible(reversible)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        step()
        gradients.append([p.grad.clone() for p in model.parameters()])
        nbytes.append(step_bytes(step, model, images, labels))
    same = sum(torch.equal(a, b) for a, b in zip(*gradients))
    return {
        "depth": depth,
        "batch_size": batch_size,
        "img_size": img_size,
        "precision": precision,
        "reversible_bytes": nbytes[0],
        "stored_bytes": nbytes[1],
        "equal_gradients": same,
        "parameters": len(gradients[0]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 48, 96])
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--img_size", type=int, default=64)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--csv", help="default: a name made of machine, torch and date, under benchmarks/results/")
    args = parser.parse_args()
    rows = [compare(depth, args.batch_size, args.img_size, args.precision) for depth in args.depths]
    for row in rows:
        print(row)
    write_rows("depth", rows, args.csv)


if __name__ == "__main__":
    main()
