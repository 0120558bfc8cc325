"""Sparse attention by PyTorch's own operators."""

from lean_arch.ops.attention.reference import backward, forward

__all__ = ["backward", "forward"]
