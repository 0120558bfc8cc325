"""Functions on tensors with their own backward."""

from lean_arch.ops.attention.lsh import lsh_attention
from lean_arch.ops.attention.op import sparse_attention
from lean_arch.ops.backend import use

__all__ = ["lsh_attention", "sparse_attention", "use"]
