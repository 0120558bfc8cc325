"""Projections around LSH attention: every token attends to those that hash as it does (Reformer).

Paper: Kitaev et al. 2020, arXiv 2001.04451, section 2: queries and keys share one projection.

Shapes: B sequences, N tokens, C channels, H heads, D channels a head: x (B, N, C), qk and v (B, H, N, D).
"""

import torch
from torch import Tensor, nn

from lean_arch.blocks.sizes import check_heads, check_whole
from lean_arch.ops import lsh_attention
from lean_arch.registry import ATTENTION

EVALUATION_SEED = 0


@ATTENTION.register("lsh")
class LSHAttention(nn.Module):
    """Multi-head attention by locality-sensitive hashing; memory and time linear in the length.

    In training every call draws new rotations from torch's own generator, so checkpoints and reversible stacks, which
    bring its state back, hash again as they did. In evaluation the rotations are always the same, on any device: a
    text is scored alike whatever was run before, and evaluating in the midst of training leaves its random numbers
    as they were.

    As in the paper, where the chunks of the sorted tokens begin depends on all tokens: a causal layer sees nothing of a
    later token, but beyond twice the bucket size the later ones change WHICH of the earlier ones a token sees.

    Args:
        dim: C; the head size C / H must be 8 to 256.
        num_heads: H.
        n_hashes: rounds of hashing; the cost grows with them, and what a token finds.
        bucket_size: tokens in a chunk; up to twice as many tokens it is full attention.
        causal: a token sees none at a later position.

    Raises ValueError where the sizes do not fit each other.
    """

    def __init__(self, dim: int, num_heads: int, n_hashes: int = 1, bucket_size: int = 64, causal: bool = False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, check_heads(dim, num_heads)
        check_whole(1, n_hashes=n_hashes, bucket_size=bucket_size)
        self.n_hashes, self.bucket_size, self.causal = n_hashes, bucket_size, causal
        self.qk = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        """(B, N, C) -> (B, N, C). Of each sequence only the first `key_lengths` (B,) tokens are seen."""
        qk, v = (layer(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for layer in (self.qk, self.v))
        out = lsh_attention(
            qk,
            v,
            n_hashes=self.n_hashes,
            bucket_size=self.bucket_size,
            causal=self.causal,
            key_lengths=key_lengths,
            generator=None if self.training else torch.Generator().manual_seed(EVALUATION_SEED),
        )
        return self.proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, n_hashes={self.n_hashes}, bucket_size={self.bucket_size}, "
            f"causal={self.causal}"
        )
