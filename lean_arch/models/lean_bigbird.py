"""Reversible BigBird: each token sees a window, some random blocks and a few global tokens, which see all.

Zaheer et al. 2020, arXiv 2007.14062. Each layer draws random blocks of its own, so that what two tokens far apart know
of each other takes few layers to arrive. Positions are rotary (Su et al. 2021, arXiv 2104.09864), norms come first,
layers are reversible (Reformer, Kitaev et al. 2020, arXiv 2001.04451): training memory does not grow with depth.

Shapes: B sequences, N tokens, D channels, V vocabulary: tokens (B, N) int64, x (B, N, D).
"""

import torch
from torch import Tensor, nn

from lean_arch.blocks import ChunkedFeedForward, ReversibleSequence, SparseAttention
from lean_arch.blocks.sizes import check_heads, check_share, check_whole
from lean_arch.models.lean_sequence import (
    VOCABULARY,
    ReversibleModel,
    check_batch,
    class_loss,
    embedded,
    kind_of,
    middle_size,
    token_loss,
)
from lean_arch.ops.patterns import Pattern, global_tokens, local, random_blocks
from lean_arch.registry import SEQUENCE_MODELS

__all__ = ["LeanBigBird"]


class AttentionPart(nn.Module):
    """x -> dropout(attention(norm(x)))"""

    def __init__(self, dim: int, attention: SparseAttention, drop_rate: float):
        super().__init__()
        self.norm, self.attn, self.drop = nn.RMSNorm(dim), attention, nn.Dropout(drop_rate)

    def forward(self, x: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        return self.drop(self.attn(self.norm(x), key_lengths=key_lengths))


class MLPPart(nn.Module):
    """x -> dropout(mlp(norm(x)))"""

    def __init__(self, dim: int, mlp: ChunkedFeedForward, drop_rate: float):
        super().__init__()
        self.norm, self.mlp, self.drop = nn.RMSNorm(dim), mlp, nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.mlp(self.norm(x)))


class Padded(nn.Module):
    """An attention part for sequences of given lengths: in a reversible layer it is called with x alone."""

    def __init__(self, part: AttentionPart, key_lengths: Tensor):
        super().__init__()
        self.part, self.key_lengths = part, key_lengths

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, self.key_lengths)


class LeanBigBird(ReversibleModel):
    """Finds hidden tokens or, with `num_classes`, says which class a sequence is of.

    Args:
        vocab_size: tokens there are; by default bytes and a few specials.
        num_classes: 0 for a model of hidden tokens, else classes of a sequence, told from its first token.
        seq_len: length to train on where nobody asks for another; any length works.
        dim, depth, num_heads: channels, layers, heads.
        window: tokens on each side that a token sees.
        global_tokens: so many tokens at the start see all and are seen by all.
        random_blocks, block: blocks of keys that each block of queries sees besides, and tokens in one; the blocks
            are drawn anew for each layer and each number of blocks in a sequence.
        mlp_ratio: width of the feed-forward layers over `dim`.
        drop_rate: dropout after each sub-layer. attn_drop_rate: of the attention weights.
        chunks: most parts of the batch that a layer's backward works on, one after the other.

    Raises ValueError for sizes that cannot be, or that do not fit each other.
    """

    objective = "masked"

    def __init__(
        self,
        vocab_size: int = VOCABULARY,
        num_classes: int = 0,
        seq_len: int = 256,
        dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        window: int = 32,
        global_tokens: int = 1,
        random_blocks: int = 1,
        block: int = 16,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        chunks: int = 4,
    ):
        super().__init__()
        check_whole(1, vocab_size=vocab_size, seq_len=seq_len, depth=depth, block=block)
        check_whole(0, num_classes=num_classes, window=window, global_tokens=global_tokens, random_blocks=random_blocks)
        check_heads(dim, num_heads)
        check_share(drop_rate=drop_rate, attn_drop_rate=attn_drop_rate)
        hidden = middle_size(dim, mlp_ratio)
        self.seq_len, self.num_classes = seq_len, num_classes
        self.embed = nn.Embedding(vocab_size, dim)
        layers = []
        for number in range(depth):
            pattern = pattern_of(window, global_tokens, random_blocks, block, seed=number)
            attention = SparseAttention(dim, num_heads, pattern, dropout=attn_drop_rate)
            mlp = ChunkedFeedForward(dim, hidden, chunks=1)
            layers.append((AttentionPart(dim, attention, drop_rate), MLPPart(dim, mlp, drop_rate)))
        self.blocks = ReversibleSequence(layers, chunks=chunks, least_chunk=2**16)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, num_classes or vocab_size)
        self.draw_weights()
        if not num_classes:
            self.head.weight = self.embed.weight

    def forward_features(self, tokens: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        """(B, N) -> (B, N, D). `key_lengths` as in `forward`."""
        x = embedded(self.embed, tokens)
        if key_lengths is None:
            return self._through(self.blocks, x)
        fits = isinstance(key_lengths, Tensor) and key_lengths.shape == tokens.shape[:1]
        if not fits or key_lengths.is_floating_point():
            raise ValueError(f"key_lengths must be integers ({len(tokens)},), got {kind_of(key_lengths)}")
        chunks = max(min(self.blocks.chunks, x.numel() // self.blocks.least_chunk), 1)
        parts = zip(x.chunk(chunks), key_lengths.chunk(chunks), strict=True)
        return torch.cat([self._through(self._padded(lengths), part) for part, lengths in parts])

    def _through(self, blocks: ReversibleSequence, x: Tensor) -> Tensor:
        y1, y2 = blocks((x, x))
        return self.norm((y1 + y2) * 0.5)

    def _padded(self, key_lengths: Tensor) -> ReversibleSequence:
        """The blocks for one part of a batch; backward goes through them again, so each part has its own."""
        blocks = ReversibleSequence([(Padded(block.f, key_lengths), block.g) for block in self.blocks])
        blocks.reversible = self.blocks.reversible
        return blocks

    def forward(
        self,
        tokens: Tensor,
        key_lengths: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Logits (B, N, V), or with `targets` (B, N), -100 where none, the loss summed over them, without logits.

        Of a classifier: logits (B, num_classes), or with `targets` (B,) the loss summed over the sequences.
        `key_lengths` (B,): only the first so many tokens of each sequence count, the others are padding.

        Raises ValueError for shapes that do not fit, and for tokens or targets of another kind or range.
        """
        check_batch(tokens, targets, of_sequences=self.num_classes > 0)
        x = self.forward_features(tokens, key_lengths)
        if self.num_classes:
            logits = self.head(x[:, 0])
            return logits if targets is None else class_loss(logits, targets, label_smoothing)
        if targets is None:
            return self.head(x)
        return token_loss(x, self.head.weight, self.head.bias, targets, label_smoothing)


def pattern_of(window: int, first: int, count: int, block: int, seed: int) -> Pattern:
    """The pattern of one layer; `count` may be 0."""
    pattern = local(window) | global_tokens(first)
    return pattern | random_blocks(count, block, seed) if count else pattern


@SEQUENCE_MODELS.register("lean_bigbird")
def lean_bigbird(**kwargs) -> LeanBigBird:
    """The smallest of the family, the same as lean_bigbird_tiny."""
    return lean_bigbird_tiny(**kwargs)


@SEQUENCE_MODELS.register("lean_bigbird_tiny")
def lean_bigbird_tiny(**kwargs) -> LeanBigBird:
    """4 layers of 128 channels, 4 heads; 0.8M parameters."""
    return LeanBigBird(**kwargs)


@SEQUENCE_MODELS.register("lean_bigbird_small")
def lean_bigbird_small(**kwargs) -> LeanBigBird:
    """8 layers of 512 channels, 8 heads; 25M parameters."""
    sizes = {"seq_len": 2048, "dim": 512, "depth": 8, "num_heads": 8, "window": 96, "block": 64, "random_blocks": 3}
    return LeanBigBird(**sizes | {"global_tokens": 64} | kwargs)


@SEQUENCE_MODELS.register("lean_bigbird_base")
def lean_bigbird_base(**kwargs) -> LeanBigBird:
    """12 layers of 768 channels, 12 heads, blocks as in the paper's base model (its table 8); 85M parameters."""
    sizes = {"seq_len": 4096, "dim": 768, "depth": 12, "num_heads": 12, "window": 96, "block": 64, "random_blocks": 3}
    return LeanBigBird(**sizes | {"global_tokens": 128} | kwargs)
