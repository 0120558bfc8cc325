"""Products with a sparse matrix by Triton and by PyTorch's operators, against dense ones in float64."""

import os
import subprocess
import sys

import pytest
import torch

from lean_arch.ops import use
from lean_arch.ops.sparse_linear import plans, portable
from tests.ops.sparse_linear.problems import TOLERANCE, compare, error, problem

DTYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16
SIZES = {"some": (17, 23, 70, 150), "one place": (5, 7, 9, 1), "full": (6, 5, 30, 17), "one entry": (9, 4, 1, 33)}


def check_products(room, dtype, size, device="cpu"):
    """Both products with a random matrix (O, C) of k entries, by row and by column."""
    outputs, inputs, entries, places = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    index = torch.randperm(outputs * inputs, generator=generator)[:entries].sort().values.to(device)
    x, grad, values = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((inputs, places), (outputs, places), (entries,))
    )
    full = torch.zeros(outputs * inputs, dtype=torch.float64, device=device)
    full = full.index_put((index,), values.double()).view(outputs, inputs)
    shape = plans.Shape(outputs, inputs, 1, 1)
    by_row, by_column = (plans.matrix([index], [], shape, transposed) for transposed in (False, True))
    for entries, matrix, numbers in ((by_row, full, x), (by_column, full.t(), grad)):
        assert (
            error(room.product(entries, entries.sorted(values), numbers), matrix @ numbers.double()) < TOLERANCE[dtype]
        )
    wanted = (grad.double() @ x.double().t()).flatten()[index]
    assert error(room.sampled_product(by_row, by_row.rows(), grad, x), wanted) < TOLERANCE[dtype]


def check_layers(change, tolerance):
    for layer, *options in (("linear",), ("embedding",), ("conv2d", (2, 1), 1)):
        sizes = {} if layer != "conv2d" else {"x": (2, 6, 5, 6), "weight": (4, 6, 3, 2)}
        compare(problem(layer, ("blocks", "entries", "rows", "columns"), *options, **sizes).map(change), tolerance)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype, size):
    check_products(portable, dtype, size)


INTERPRETED = """
import torch
from lean_arch.ops import use
from lean_arch.ops.sparse_linear import kernels
from tests.ops.sparse_linear.test_kernels import SIZES, check_layers, check_products

def poisoned(new):
    def poison(*size, **more):
        tensor = new(*size, **more)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor
    return poison

torch.empty, torch.Tensor.new_empty = poisoned(torch.empty), poisoned(torch.Tensor.new_empty)
kernels.PRODUCT, kernels.SAMPLED = {"BLOCK_E": 4, "BLOCK_P": 128}, {"BLOCK_E": 8, "BLOCK_P": 64}
for size in SIZES:
    check_products(kernels, torch.float64 if size == "one entry" else torch.float32, size)
    check_products(kernels, torch.float16, size)
with use("triton"):
    check_layers(torch.Tensor.float, 3e-6)
    check_layers(torch.Tensor.half, 2e-3)
print("right")
"""


def test_triton_interpreted():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_on_a_gpu(dtype, size):
    from lean_arch.ops.sparse_linear import kernels

    check_products(kernels, dtype, size, "cuda")
    check_products(portable, dtype, size, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_on_a_gpu(dtype, backend):
    with use(backend), torch.backends.cudnn.flags(allow_tf32=False):
        check_layers(lambda t: t.to("cuda", dtype), 2 * TOLERANCE[dtype])
