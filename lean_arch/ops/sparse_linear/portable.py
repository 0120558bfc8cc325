"""Products with single entries of a weight by PyTorch's operators: a weighted sum of some rows of x transposed.

An output is the sum of a few inputs, each times its value, over all tokens: F.embedding_bag of x transposed. The
gradient of a value is a row of x times a row of the output's gradient, both transposed: embedding_bag's gradient by its
weights. Tokens come by in slices, which are transposed one at a time and stay in the cache.

Against what else there is, one core of an AMD EPYC (AVX2), torch 2.14, T = 1576, float32, milliseconds for 768 inputs
and 3072 outputs / 3072 inputs and 768 outputs, beside 113 / 115 for the layer's own dense product:

                                        1% of the weights    0.1%
    product: embedding_bag, 64 tokens       15.5 / 12.2      13.8 / 11.9
             embedding_bag, all tokens      31.6 / 19.5      29.5 / 12.9
             CSR matrix @ x                 23.5 / 46.6      10.9 / 16.9
             dense tiles of the update       114 / 137        111 / 164
    values:  embedding_bag, 64 tokens       32.3 / 28.0      19.6 / 16.5
             embedding_bag, 128 tokens      21.7 / 26.1      13.9 / 19.1
             sampled_addmm                  18.3 / 22.5      11.9 / 17.9   (two whole transposes in memory)
             gathers and dot products        105 / 131       20.6 / 18.8
             dense tiles, gathered           113 / 191        138 / 152

Shapes: x (T, C), y, grad (T, O), values (k,).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops.plain_convolution import arithmetic, slices
from lean_arch.ops.sparse_linear.csr import Csr

TOKENS = 128  # of a slice on a CPU


def add_product(y: Tensor, x: Tensor, values: Tensor, csr: Csr) -> None:
    """y += x times the transpose of the sparse matrix (O, C) that has `values` at the places of `csr`, in place."""
    dtype = arithmetic(y.dtype, y.device)
    values = values.to(dtype)
    for part in token_slices(x):
        columns = transposed(x[part], dtype)
        y[part] += F.embedding_bag(
            csr.columns, columns, csr.offsets, mode="sum", per_sample_weights=values, include_last_offset=True
        ).t()


def sampled_product(grad: Tensor, x: Tensor, csr: Csr) -> Tensor:
    """The entries of grad^T x (O, C) at the places of `csr`: (k,), summed over slices in float32 or float64."""
    dtype = arithmetic(grad.dtype, grad.device)
    sums = grad.new_zeros(len(csr.columns), dtype=torch.promote_types(dtype, torch.float32))
    for part in token_slices(x):
        sums += torch.ops.aten._embedding_bag_per_sample_weights_backward(
            transposed(grad[part], dtype), transposed(x[part], dtype), csr.columns, csr.offsets, csr.rows, 0
        )
    return sums


def token_slices(x: Tensor):
    return slices(x, elements=TOKENS * x.shape[1])


def transposed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.t().to(dtype, memory_format=torch.contiguous_format)
