"""Layers with a frozen weight and a small trained update that is sparse."""

from lean_arch.ops.sparse_linear.op import sparse_conv1d, sparse_conv2d, sparse_embedding, sparse_linear
from lean_arch.ops.sparse_linear.structures import Blocks, Columns, Entries, Rows

__all__ = [
    "Blocks",
    "Columns",
    "Entries",
    "Rows",
    "sparse_conv1d",
    "sparse_conv2d",
    "sparse_embedding",
    "sparse_linear",
]
