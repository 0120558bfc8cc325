"""Train an architecture: `python train.py --arch lean_vit`. `python train.py --help` lists the options."""

import sys

from lean_arch.cli import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
