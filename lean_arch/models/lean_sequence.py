"""What all sequence architectures share: the vocabulary of bytes, what the loop asks of them, reversible layers.

A sequence model is an nn.Module, registered in `lean_arch.registry.SEQUENCE_MODELS`, with
    objective   "causal" (targets are the next bytes) or "masked" (targets are the bytes that were hidden)
    seq_len     the length it is trained on where nobody asks for another; a keyword of its constructor
    model(tokens)                   -> logits (B, N, V)
    model(tokens, targets=targets, label_smoothing=0.0)  -> loss, summed over the targets that count

Shapes: B sequences, N tokens, D channels, V vocabulary: tokens, targets (B, N) int64; target -100 does not count.
"""

import enum
from collections import OrderedDict

import torch
from torch import Tensor, nn

from lean_arch.ops import linear_cross_entropy

BYTES = 256
IGNORED = -100  # the target that does not count


class Special(enum.IntEnum):
    """The tokens that are no byte."""

    PAD = BYTES
    MASK = enum.auto()
    CLS = enum.auto()
    SEP = enum.auto()


VOCABULARY = BYTES + len(Special)


class ReversibleModel(nn.Module):
    """A model whose layers are a ReversibleSequence, `blocks`."""

    def set_reversible(self, enabled: bool) -> None:
        """False: the same mathematics with activations stored; True (the default): rebuilt in backward."""
        self.blocks.reversible = enabled

    def draw_weights(self) -> None:
        """Weights of 0.02, those that end a sub-layer smaller by the number of sub-layers (GPT-2's scheme)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            for block in self.blocks:
                for part in (block.f, block.g):
                    *_, last = (module for module in part.modules() if isinstance(module, nn.Linear))
                    last.weight.div_((2 * len(self.blocks)) ** 0.5)


class ReversibleDecoder(ReversibleModel):
    """Predicts each next token from those before it; `forward_features` (B, N) -> (B, N, D), `head` to logits."""

    objective = "causal"

    def forward(self, tokens: Tensor, targets: Tensor | None = None, label_smoothing: float = 0.0) -> Tensor:
        """Logits (B, N, V), or with `targets` (B, N), -100 where none, the loss summed over them.

        The loss takes no memory for logits.
        """
        x = self.forward_features(tokens)
        if targets is None:
            return self.head(x)
        options = {"label_smoothing": label_smoothing, "reduction": "sum"}
        return linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten(), **options)


def sub_layer(dim: int, drop_rate: float, **layer: nn.Module) -> nn.Sequential:
    """f or g of a reversible layer: a norm, the layer by its name, dropout."""
    parts = {"norm": nn.RMSNorm(dim), **layer} | ({"drop": nn.Dropout(drop_rate)} if drop_rate else {})
    return nn.Sequential(OrderedDict(parts))
