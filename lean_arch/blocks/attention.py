"""Attention layers: projections around the operators of `lean_arch.ops`.

Shapes: B sequences, N tokens, C channels, Hq query heads, Hkv key-value heads, D channels a head: x (B, N, C),
q (B, Hq, N, D), k and v (B, Hkv, N, D).
"""

import dataclasses

import torch
from torch import Tensor, nn

from lean_arch.blocks.rotary import rotary
from lean_arch.blocks.sizes import check_heads, check_share, check_whole
from lean_arch.ops import sparse_attention
from lean_arch.ops.patterns import Band, Pattern
from lean_arch.registry import ATTENTION


@dataclasses.dataclass
class KeyValues:
    """Keys and values of the tokens a layer has seen, for generating one after the other."""

    k: Tensor | None = None
    v: Tensor | None = None
    seen: int = 0  # tokens

    def extend(self, k: Tensor, v: Tensor, keep: int | None) -> tuple[Tensor, Tensor]:
        """The keys and values so far with those of new tokens; the last `keep` (None: all) stay for the next call."""
        self.seen += k.shape[2]
        if self.k is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        start = 0 if keep is None else max(k.shape[2] - keep, 0)
        self.k, self.v = k[:, :, start:], v[:, :, start:]
        return k, v


@ATTENTION.register("sparse")
class SparseAttention(nn.Module):
    """Multi-head attention over the pairs that a pattern allows; memory linear in the length.

    Args:
        dim: channels of the input and output.
        num_heads: query heads, of dim / num_heads channels each, 8 to 256.
        pattern: which query may see which key, from `lean_arch.ops.patterns`.
        num_kv_heads: key-value heads, each of which serves num_heads / num_kv_heads query heads (Ainslie et al.
            2023, arXiv 2305.13245); default: num_heads.
        rotary: turn queries and keys by their positions (`lean_arch.blocks.rotary`).
        qkv_bias: biases of the query, key and value projections.
        dropout: share of the attention weights set to zero in training.

    Raises ValueError when the sizes do not fit each other, TypeError for a pattern that is none.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        pattern: Pattern,
        num_kv_heads: int | None = None,
        rotary: bool = True,
        qkv_bias: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if not isinstance(pattern, Pattern):
            raise TypeError(f"pattern {pattern!r} is no attention pattern; local(256) or causal() is one")
        size = check_heads(dim, num_heads)
        check_whole(1, num_kv_heads=num_kv_heads)
        check_share(dropout=dropout)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        if rotary and size % 2:
            raise ValueError(f"dim {dim} gives {num_heads} heads of {size} channels; rotary needs an even number")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, size
        self.pattern, self.rotary, self.dropout = pattern, rotary, dropout
        self.qkv = nn.Linear(dim, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        key_lengths: Tensor | None = None,
        segment_ids: Tensor | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """(B, N, C) -> (B, N, C).

        `key_lengths` (B,) and `segment_ids` (B, N) are those of `lean_arch.ops.sparse_attention`. With a `cache`, x
        continues the tokens that it holds, and sees them as the pattern, a causal one, says.
        """
        q, k, v = self._heads(x, 0 if cache is None else cache.seen)
        if cache is not None:
            k, v = cache.extend(k, v, self._reach())
        options = {"key_lengths": key_lengths, "segment_ids": segment_ids}
        out = sparse_attention(q, k, v, self.pattern, dropout_p=self.dropout if self.training else 0.0, **options)
        return self.proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = self.qkv(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2).split(sizes, 1)
        return (rotary(q, first), rotary(k, first), v) if self.rotary else (q, k, v)

    def _reach(self) -> int | None:
        """How many tokens back the next one may see; None: all."""
        if not isinstance(self.pattern, Band) or self.pattern.right != 0:
            raise ValueError(f"pattern {self.pattern} cannot go with a cache; causal() and local(window, 0) can")
        return self.pattern.left

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, pattern={self.pattern}"
