"""What all sequence architectures share: the vocabulary of bytes, what the loop asks of them, input and loss.

A sequence model is an nn.Module, registered in `lean_arch.registry.SEQUENCE_MODELS`, with
    objective   "causal" (targets are the next bytes) or "masked" (targets are the bytes that were hidden)
    seq_len     the length it is trained on where nobody asks for another; a keyword of its constructor
    model(tokens)                   -> logits (B, N, V)
    model(tokens, targets=targets, label_smoothing=0.0)  -> loss, summed over the targets that count

Shapes: B sequences, N tokens, D channels, V vocabulary, K classes: tokens, targets (B, N) int64; target -100 does not
count.
"""

import enum
import math
from collections import OrderedDict
from numbers import Real

import torch
import torch.nn.functional as F
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


def check_batch(tokens: Tensor, targets: Tensor | None = None, of_sequences: bool = False) -> None:
    """Raises ValueError unless `tokens` are integers (B, N) and `targets` int64 (B, N), or (B,) of whole sequences."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
        raise ValueError(f"tokens must be a tensor (B, N) of int64 or int32, got {kind_of(tokens)}")
    if tokens.shape[1] == 0:
        raise ValueError(f"tokens are {tuple(tokens.shape)}; (B, N) with N at least 1 works")
    shape = tokens.shape[:1] if of_sequences else tokens.shape
    if targets is not None and not (
        isinstance(targets, Tensor) and targets.dtype == torch.int64 and targets.shape == shape
    ):
        raise ValueError(f"targets must be a tensor {tuple(shape)} of int64, got {kind_of(targets)}")


def kind_of(thing) -> str:
    return f"{thing.dtype} {tuple(thing.shape)}" if isinstance(thing, Tensor) else type(thing).__name__


def embedded(embed: nn.Embedding, tokens: Tensor) -> Tensor:
    """(B, N) -> (B, N, D). Raises ValueError for what are no tokens of the vocabulary.

    On a GPU those out of range end in its own assertion: to look for them would be to wait for it.
    """
    check_batch(tokens)
    try:
        return embed(tokens)
    except IndexError as error:
        low, high = tokens.min().item(), tokens.max().item()
        last = embed.num_embeddings - 1
        raise ValueError(f"tokens go from {low} to {high}; vocab_size {last + 1} has 0 to {last}") from error


def token_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, label_smoothing: float) -> Tensor:
    """The cross-entropy of x (B, N, D) `weight` (V, D) + `bias` (V,), summed over targets (B, N), without logits."""
    options = {"label_smoothing": label_smoothing, "reduction": "sum"}
    return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), bias, **options)


def class_loss(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """The cross-entropy of logits (B, K), summed over targets (B,); out of range as with `embedded`."""
    try:
        return F.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=label_smoothing)
    except IndexError as error:
        low, high, classes = targets.min().item(), targets.max().item(), logits.shape[1]
        raise ValueError(
            f"targets go from {low} to {high}; num_classes {classes} has 0 to {classes - 1}, and {IGNORED} counts not"
        ) from error


def middle_size(dim: int, mlp_ratio: float) -> int:
    """Channels in the middle of a feed-forward layer. Raises ValueError where there are none."""
    if not isinstance(mlp_ratio, Real) or not math.isfinite(mlp_ratio) or round(dim * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio {mlp_ratio!r} must be a number that makes 1 or more of dim {dim}; 4 does")
    return round(dim * mlp_ratio)


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

        The loss takes no memory for logits. Raises ValueError for tokens or targets of another kind, shape or range.
        """
        check_batch(tokens, targets)
        x = self.forward_features(tokens)
        return self.head(x) if targets is None else token_loss(x, self.head.weight, None, targets, label_smoothing)


def sub_layer(dim: int, drop_rate: float, **layer: nn.Module) -> nn.Sequential:
    """f or g of a reversible layer: a norm, the layer by its name, dropout."""
    parts = {"norm": nn.RMSNorm(dim), **layer} | ({"drop": nn.Dropout(drop_rate)} if drop_rate else {})
    return nn.Sequential(OrderedDict(parts))
