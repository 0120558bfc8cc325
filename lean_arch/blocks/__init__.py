"""Building blocks: nn.Modules that can be lifted into any code base."""

from lean_arch.blocks.attention import KeyValues, SparseAttention
from lean_arch.blocks.convnext import ConvNeXtBlock
from lean_arch.blocks.feedforward import ChunkedFeedForward
from lean_arch.blocks.layer_norm2d import ConvNorm2d, LayerNorm2d, NormConv2d
from lean_arch.blocks.lsh_attention import LSHAttention
from lean_arch.blocks.memory_layer import MemoryLayer
from lean_arch.blocks.norm_act import NormAct2d
from lean_arch.blocks.reversible import ReversiblePair, ReversibleSequence
from lean_arch.blocks.separable import InvertedResidual, SeparableConv2d
from lean_arch.blocks.universal import UniversalInvertedResidual

__all__ = [
    "ChunkedFeedForward",
    "ConvNeXtBlock",
    "ConvNorm2d",
    "InvertedResidual",
    "KeyValues",
    "LSHAttention",
    "LayerNorm2d",
    "MemoryLayer",
    "NormAct2d",
    "NormConv2d",
    "ReversiblePair",
    "ReversibleSequence",
    "SeparableConv2d",
    "SparseAttention",
    "UniversalInvertedResidual",
]
