"""Building blocks: nn.Modules that can be lifted into any code base."""

from lean_arch.blocks.attention import KeyValues, SparseAttention
from lean_arch.blocks.feedforward import ChunkedFeedForward
from lean_arch.blocks.lsh_attention import LSHAttention
from lean_arch.blocks.reversible import ReversiblePair, ReversibleSequence

__all__ = ["ChunkedFeedForward", "KeyValues", "LSHAttention", "ReversiblePair", "ReversibleSequence", "SparseAttention"]
