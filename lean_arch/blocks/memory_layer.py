"""The memory layer: a large table of values, of which a token reads the few whose keys are nearest to its queries.

Keys are products: slot (i, j) of the n x n slots has the i-th key of one half table and the j-th of another, so the
best of n^2 are found among 2 n scores ("Large Memory Layers with Product Keys", Lample et al. 2019, arXiv 1907.05242,
section 3.2). Heads share the values; a gate that sees the input scales what is read ("Memory Layers at Scale", Berges
et al. 2024, arXiv 2412.09764, section 3, "Memory+").

Shapes: x (..., C), queries (T, H, Q), keys (2, H, n, Q / 2), reads (..., H K), values (n^2, V).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_arch.blocks.sizes import check_share, check_whole
from lean_arch.ops import memory_lookup


class MemoryLayer(nn.Module):
    """Takes a feed-forward layer's place: more parameters for the same arithmetic. `values` is the table (n^2, V).

    Args:
        dim: C, of input and output.
        num_keys: n, keys of each half; there are n^2 slots.
        num_heads: H, each with queries and keys of its own.
        top_k: K, slots that a head reads, at most n.
        value_dim: V; `dim` by default.
        key_dim: Q, an even number; `dim` or the even number below by default.
        gated: what is read is multiplied by silu(W x) before the output projection.
        dropout: share of the output set to zero in training.
        sparse: the gradient of `values` holds only the rows that were read. SGD, Adagrad and SparseAdam take it; False
            is for other optimisers.

    Raises ValueError for sizes that cannot be.
    """

    def __init__(
        self,
        dim: int,
        num_keys: int,
        num_heads: int = 4,
        top_k: int = 32,
        value_dim: int | None = None,
        key_dim: int | None = None,
        gated: bool = True,
        dropout: float = 0.0,
        sparse: bool = True,
    ):
        super().__init__()
        check_whole(1, dim=dim, num_keys=num_keys, num_heads=num_heads, top_k=top_k)
        value_dim = dim if value_dim is None else value_dim
        key_dim = dim - dim % 2 if key_dim is None else key_dim
        check_whole(1, value_dim=value_dim)
        check_whole(2, key_dim=key_dim)
        check_share(dropout=dropout)
        if key_dim % 2:
            raise ValueError(f"key_dim {key_dim} is cut in two halves; an even number works")
        if top_k > num_keys:
            raise ValueError(f"top_k {top_k} is more than num_keys {num_keys}; as many or fewer work")
        self.num_keys, self.num_heads, self.top_k, self.sparse = num_keys, num_heads, top_k, sparse
        self.query = nn.Linear(dim, num_heads * key_dim, bias=False)
        self.query_norm = nn.RMSNorm(key_dim, elementwise_affine=False)  # the keys have the scales
        self.keys = nn.Parameter(torch.empty(2, num_heads, num_keys, key_dim // 2))
        self.values = nn.Parameter(torch.empty(num_keys**2, value_dim))
        self.gate = nn.Linear(dim, value_dim, bias=False) if gated else None
        self.proj = nn.Linear(value_dim, dim, bias=False)
        self.drop = nn.Dropout(dropout)
        # the a-th best of one half with the b-th best of the other: (a + 1)(b + 1) sums are at least as good
        ranks = torch.arange(1, top_k + 1)
        candidates = (ranks[:, None] * ranks <= top_k).nonzero().t().contiguous()
        self.register_buffer("candidates", candidates, persistent=False)
        # scores of a normed query then have a variance of 1, and read values one of about 1
        nn.init.normal_(self.keys, std=key_dim**-0.5)
        nn.init.normal_(self.values, std=(num_heads * top_k) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        index, weights = self.read(x)
        out = self.recall(index, weights)
        if self.gate is not None:
            out = out * F.silu(self.gate(x))
        return self.drop(self.proj(out))

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The slots that each token reads, (..., H K) int64, and their weights, which a softmax makes of each head's.

        Under autocast weights are float32.
        """
        queries = self.query_norm(self.query(x).view(-1, self.num_heads, self.keys.shape[-1] * 2))
        scores, best = self.nearest(queries)
        shape = (*x.shape[:-1], self.num_heads * self.top_k)
        return best.reshape(shape), scores.softmax(-1).reshape(shape)

    def nearest(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The `top_k` best scores of queries (T, H, Q) over all slots and whose they are, both (T, H, K)."""
        halves = queries.unflatten(-1, (2, -1))
        (first, i), (second, j) = (
            torch.einsum("thq,hnq->thn", halves[:, :, side], keys).topk(self.top_k)
            for side, keys in enumerate(self.keys)
        )
        a, b = self.candidates
        scores, best = (first[..., a] + second[..., b]).topk(self.top_k)
        a, b = a[best], b[best]
        return scores, i.gather(-1, a) * self.num_keys + j.gather(-1, b)

    def recall(self, index: Tensor, weights: Tensor) -> Tensor:
        """The sum of the values at `index`, by `weights`: (..., H K) -> (..., V)."""
        out = memory_lookup(self.values, index.flatten(0, -2), weights.flatten(0, -2), sparse=self.sparse)
        return out.view(*index.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"slots={len(self.values)}, num_heads={self.num_heads}, top_k={self.top_k}"
