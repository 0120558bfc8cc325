"""Building blocks: nn.Modules that can be lifted into any code base."""

from lean_arch.blocks.attention import KeyValues, SparseAttention
from lean_arch.blocks.reversible import ReversiblePair, ReversibleSequence

__all__ = ["KeyValues", "ReversiblePair", "ReversibleSequence", "SparseAttention"]
