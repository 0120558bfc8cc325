"""Reformer: a reversible decoder whose every second layer finds the tokens it attends to by hashing.

Paper: Kitaev et al. 2020, arXiv 2001.04451. Layers that see a window of the last tokens alternate with layers of LSH
attention; reversible layers, feed-forward in chunks and factorised positions keep what a long sequence costs small.
Heads of local layers turn queries and keys by their positions too (rotary, Su et al. 2021, arXiv 2104.09864).

Shapes: B sequences, N tokens, D channels, V vocabulary: tokens (B, N) int64, x (B, N, D).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lean_arch.blocks import ChunkedFeedForward, LSHAttention, ReversibleSequence, SparseAttention
from lean_arch.blocks.sizes import check_heads, check_share, check_whole
from lean_arch.models.lean_sequence import VOCABULARY, ReversibleDecoder, embedded, middle_size, sub_layer
from lean_arch.ops.patterns import local
from lean_arch.registry import SEQUENCE_MODELS

__all__ = ["AxialPositions", "LeanReformer"]


class AxialPositions(nn.Module):
    """Position p of a grid of `shape` = (rows, columns) is the vector [row(p // columns), column(p % columns)].

    Two tables of rows + columns vectors in all stand for rows * columns positions; each has half of the channels
    (the paper's section "Axial positional embeddings", in its code; Ho et al. 2019, arXiv 1912.12180).
    """

    def __init__(self, shape: tuple[int, int], dim: int):
        super().__init__()
        if not isinstance(shape, Sequence) or len(shape) != 2:
            raise ValueError(f"axial_shape {shape!r} must be two numbers, (rows, columns); (16, 16) reaches 256 tokens")
        rows, columns = shape
        for number in shape:
            check_whole(1, axial_shape=number)
        self.rows = nn.Parameter(torch.zeros(rows, dim - dim // 2))
        self.columns = nn.Parameter(torch.zeros(columns, dim // 2))

    @property
    def reach(self) -> int:
        return len(self.rows) * len(self.columns)

    def forward(self, length: int) -> Tensor:
        """(length, D). Raises ValueError beyond rows * columns."""
        rows, columns = len(self.rows), len(self.columns)
        if length > self.reach:
            raise ValueError(
                f"{length} tokens are more than the {rows} x {columns} axial positions, up to {self.reach} work; "
                "a model made with a larger seq_len takes more"
            )
        used = -(-length // columns)
        grid = (self.rows[:used, None].expand(-1, columns, -1), self.columns.expand(used, -1, -1))
        return torch.cat(grid, -1).flatten(0, 1)[:length]


class LeanReformer(ReversibleDecoder):
    """Predicts each next token from those before it.

    Nothing that a later token holds reaches an earlier one, but beyond twice the bucket size it has a say in which of
    the tokens before it an earlier one sees (`LSHAttention`).

    Args:
        vocab_size: tokens there are; by default bytes and a few specials.
        seq_len: length to train on where nobody asks for another.
        axial_shape: (rows, columns) of the positions; their product is the greatest length. By default as near to a
            square as lets them reach seq_len.
        dim, depth, num_heads: channels, layers, heads.
        window: tokens before its own that a token sees in the odd layers.
        n_hashes, bucket_size: of the LSH attention in the even ones.
        mlp_ratio: width of the feed-forward layers over `dim`.
        mlp_chunks: pieces of the batch's tokens whose wide middle exists one after the other.
        tied: the projection onto the vocabulary is the embedding itself.
        drop_rate: dropout after each sub-layer.

    Raises ValueError for sizes that cannot be, or that do not fit each other.
    """

    def __init__(
        self,
        vocab_size: int = VOCABULARY,
        seq_len: int = 256,
        axial_shape: tuple[int, int] | None = None,
        dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        window: int = 64,
        n_hashes: int = 2,
        bucket_size: int = 32,
        mlp_ratio: float = 4.0,
        mlp_chunks: int = 8,
        tied: bool = True,
        drop_rate: float = 0.0,
    ):
        super().__init__()
        check_whole(1, vocab_size=vocab_size, seq_len=seq_len, depth=depth, window=window, mlp_chunks=mlp_chunks)
        check_heads(dim, num_heads)
        check_share(drop_rate=drop_rate)
        hidden = middle_size(dim, mlp_ratio)
        self.seq_len = seq_len
        self.embed = nn.Embedding(vocab_size, dim)
        self.positions = AxialPositions(near_square(seq_len) if axial_shape is None else axial_shape, dim)
        if self.positions.reach < seq_len:
            raise ValueError(f"axial_shape {axial_shape} reaches {self.positions.reach} tokens, seq_len is {seq_len}")
        layers = []
        for number in range(1, depth + 1):
            hashed = number % 2 == 0
            attention = (
                LSHAttention(dim, num_heads, n_hashes, bucket_size, causal=True)
                if hashed
                else SparseAttention(dim, num_heads, local(window, 0))
            )
            feed_forward = ChunkedFeedForward(dim, hidden, mlp_chunks)
            layers.append((sub_layer(dim, drop_rate, attn=attention), sub_layer(dim, drop_rate, mlp=feed_forward)))
        self.blocks = ReversibleSequence(layers)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.draw_weights()
        for parameter in self.positions.parameters():
            nn.init.normal_(parameter, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward_features(self, tokens: Tensor) -> Tensor:
        """(B, N) -> (B, N, D). Raises ValueError for more tokens than there are positions."""
        x = embedded(self.embed, tokens) + self.positions(tokens.shape[1])
        y1, y2 = self.blocks((x, x))
        return self.norm((y1 + y2) * 0.5)


def near_square(length: int) -> tuple[int, int]:
    """(rows, columns), as many or twice as many columns, a power of two, whose product is `length` or little more."""
    columns = 2 ** (((length - 1).bit_length() + 1) // 2)
    return -(-length // columns), columns


@SEQUENCE_MODELS.register("lean_reformer")
def lean_reformer(**kwargs) -> LeanReformer:
    """The smallest of the family, the same as lean_reformer_tiny."""
    return lean_reformer_tiny(**kwargs)


@SEQUENCE_MODELS.register("lean_reformer_tiny")
def lean_reformer_tiny(**kwargs) -> LeanReformer:
    """4 layers of 128 channels, 4 heads; 0.8M parameters."""
    return LeanReformer(**kwargs)


@SEQUENCE_MODELS.register("lean_reformer_small")
def lean_reformer_small(**kwargs) -> LeanReformer:
    """12 layers of 512 channels, 8 heads; 4096 tokens."""
    sizes = {"seq_len": 4096, "dim": 512, "depth": 12, "num_heads": 8, "window": 128}
    return LeanReformer(**sizes | {"n_hashes": 4, "bucket_size": 64} | kwargs)


@SEQUENCE_MODELS.register("lean_reformer_base")
def lean_reformer_base(**kwargs) -> LeanReformer:
    """12 layers of 1024 channels, 8 heads; 16384 tokens."""
    sizes = {"seq_len": 16_384, "dim": 1024, "depth": 12, "num_heads": 8, "window": 128}
    return LeanReformer(**sizes | {"n_hashes": 4, "bucket_size": 128, "mlp_chunks": 16} | kwargs)
