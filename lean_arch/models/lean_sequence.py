"""What all sequence architectures share: the vocabulary of bytes, and what the loop asks of them.

A sequence model is an nn.Module, registered in `lean_arch.registry.SEQUENCE_MODELS`, with
    objective   "causal" (targets are the next bytes) or "masked" (targets are the bytes that were hidden)
    seq_len     the length it is trained on where nobody asks for another; a keyword of its constructor
    model(tokens)                   -> logits (B, N, V)
    model(tokens, targets=targets, label_smoothing=0.0)  -> loss, summed over the targets that count

Shapes: B sequences, N tokens, D channels, V vocabulary: tokens, targets (B, N) int64; target -100 does not count.
"""

import enum

BYTES = 256
IGNORED = -100  # the target that does not count


class Special(enum.IntEnum):
    """The tokens that are no byte."""

    PAD = BYTES
    MASK = enum.auto()
    CLS = enum.auto()
    SEP = enum.auto()


VOCABULARY = BYTES + len(Special)
