"""What all sequence architectures share: the vocabulary of bytes, and the loss of a projection onto it.

A sequence model is an nn.Module, registered in `lean_arch.registry.SEQUENCE_MODELS`, with
    objective   "causal" (targets are the next bytes) or "masked" (targets are the bytes that were hidden)
    seq_len     the length it is trained on where nobody asks for another; a keyword of its constructor
    model(tokens)                   -> logits (B, N, V)
    model(tokens, targets=targets, label_smoothing=0.0)  -> loss, summed over the targets that count

Shapes: B sequences, N tokens, D channels, V vocabulary: tokens, targets (B, N) int64; target -100 does not count.
"""

import enum

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BYTES = 256
ROWS = 1024  # whose logits exist at a time
IGNORED = -100  # the target that does not count


class Special(enum.IntEnum):
    """The tokens that are no byte."""

    PAD = BYTES
    MASK = enum.auto()
    CLS = enum.auto()
    SEP = enum.auto()


VOCABULARY = BYTES + len(Special)


def projected_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of x (B, N, D) projected by weight (V, D) and bias (V,), summed over the targets that count."""
    x, targets = x.flatten(0, 1), targets.flatten()
    pieces = zip(x.split(ROWS), targets.split(ROWS), strict=True)
    return sum(checkpoint(_piece, x, weight, bias, t, label_smoothing, use_reentrant=False) for x, t in pieces)


def _piece(x, weight, bias, targets, label_smoothing):
    logits = F.linear(x, weight, bias).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum")
