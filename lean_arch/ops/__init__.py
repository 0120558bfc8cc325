"""Functions on tensors with their own backward."""

from lean_arch.ops.attention.lsh import lsh_attention
from lean_arch.ops.attention.op import sparse_attention
from lean_arch.ops.backend import use
from lean_arch.ops.depthwise.op import depthwise_conv2d
from lean_arch.ops.layer_norm2d.op import layer_norm2d
from lean_arch.ops.linear_cross_entropy.op import linear_cross_entropy
from lean_arch.ops.memory_lookup.op import memory_lookup
from lean_arch.ops.sparse_linear.op import sparse_conv1d, sparse_conv2d, sparse_embedding, sparse_linear

__all__ = [
    "depthwise_conv2d",
    "layer_norm2d",
    "linear_cross_entropy",
    "lsh_attention",
    "memory_lookup",
    "sparse_attention",
    "sparse_conv1d",
    "sparse_conv2d",
    "sparse_embedding",
    "sparse_linear",
    "use",
]
