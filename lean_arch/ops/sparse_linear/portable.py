"""Products with a sparse matrix by PyTorch's operators: weighted sums of some rows of a dense one.

An output is the sum of a few inputs, each times its value, at all places at once: F.embedding_bag of x transposed. The
gradient of a value is a row of x times a row of the output's gradient: embedding_bag's gradient by its weights. Places
come by in slices of 128, which are transposed one at a time and stay in the cache.

Against what else there is, one core of an AMD EPYC (AVX2), torch 2.14, 1576 tokens, float32, milliseconds for 768
inputs and 3072 outputs / 3072 inputs and 768 outputs, beside 113 / 115 for the layer's own dense product:

                                        1% of the weights    0.1%
    product: embedding_bag, 128 tokens      23.5 / 14.8      19.4 / 18.1
             embedding_bag, all tokens      31.6 / 19.5      29.5 / 12.9
             CSR matrix @ x                 23.5 / 46.6      10.9 / 16.9
             dense tiles of the update       114 / 137        111 / 164
    values:  embedding_bag, 128 tokens      21.7 / 26.1      13.9 / 19.1
             sampled_addmm                  18.3 / 22.5      11.9 / 17.9   (two whole transposes in memory)
             gathers and dot products        105 / 131       20.6 / 18.8
             dense tiles, gathered           113 / 191        138 / 152

Blocks go the same way: a dense product for each row of blocks takes less only where blocks are large (92 of 16x16:
37.5 ms against 26.8, 23 of 32x32: 9.5 against 21.7, 1474 of 4x4: 126 against 23).

Shapes: x (C, T), grad (O, T), values (k,), entries of a matrix (O, C).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.sparse_linear.plans import Matrix


def product(entries: Matrix, values: Tensor, x: Tensor) -> Tensor:
    """The sparse matrix times x: (O, T). x is contiguous, values are of its dtype."""
    return F.embedding_bag(
        entries.columns, x, entries.offsets, mode="sum", per_sample_weights=values, include_last_offset=True
    )


def sampled_product(entries: Matrix, rows: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """The entries of grad x^T: (k,). Both are contiguous and of the same dtype; `rows` are entries.rows()."""
    backward = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return backward(grad, x, entries.columns, entries.offsets, rows, 0)
