"""The feed-forward layer, in chunks of tokens: it has no token look at another, so its wide middle need not be whole.

Reformer (Kitaev et al. 2020, arXiv 2001.04451), section 3, "Chunking".

Shapes: x (..., C), the middle (..., F), which exists for one chunk of rows at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lean_arch.blocks.sizes import check_share, check_whole
from lean_arch.ops.linear import rowwise_linears


class ChunkedFeedForward(nn.Module):
    """Linear, activation, dropout, Linear, dropout; a chunk of rows after the other, forward and backward.

    For the backward pass it keeps its input and computes the middle again, chunk by chunk (with the same dropout).
    The numbers are those of the whole layer at once; only sums over rows, in the weights' gradients, round otherwise.

    Args:
        dim: C.
        hidden_dim: F; 4 * dim by default.
        chunks: at most so many, of as many rows each. 1: the plain layer, which stores its middle.
        dropout: share of the middle and of the output set to zero in training.
        activation: makes the activation module, e.g. `nn.GELU` or `nn.ReLU`.

    Raises ValueError for sizes or chunks below 1, TypeError for an `activation` that makes no module.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        chunks: int = 8,
        dropout: float = 0.0,
        activation: Callable[[], nn.Module] = nn.GELU,
    ):
        super().__init__()
        check_whole(1, dim=dim, chunks=chunks)
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        check_whole(1, hidden_dim=hidden_dim)
        check_share(dropout=dropout)
        self.chunks, self.dropout = chunks, dropout
        self.fc1, self.fc2 = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)
        self.act, self.drop = made(activation), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        if self.chunks == 1:
            return self._rows(x)
        draws = self.training and self.dropout > 0
        parts = x.flatten(0, -2).chunk(self.chunks)
        parts = [checkpoint(self._rows, part, use_reentrant=False, preserve_rng_state=draws) for part in parts]
        return torch.cat(parts).view(x.shape)

    def _rows(self, x: Tensor) -> Tensor:
        # said here, for what surrounds the forward pass does not surround what is computed again in the backward pass
        with rowwise_linears():
            return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))

    def extra_repr(self) -> str:
        return f"chunks={self.chunks}"


def made(activation: Callable[[], nn.Module]) -> nn.Module:
    try:
        module, cause = activation(), None
    except TypeError as error:  # a name, a function of tensors, a module that is made already
        module, cause = None, error
    if not isinstance(module, nn.Module):
        raise TypeError(f"activation {activation!r} makes no module when called; the class nn.GELU does") from cause
    return module
