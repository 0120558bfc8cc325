"""The attention kernels against a float64 oracle: by Triton's interpreter anywhere, and on a GPU where there is one."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
PATH = pathlib.Path(__file__).with_name("kernel_cases.py")
spec = importlib.util.spec_from_file_location("kernel_cases", PATH)
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, PATH], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", cases.CASES)
def test_interpreted(interpreted, name):
    assert interpreted[name] <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("name", cases.CASES)
def test_on_a_gpu(name, dtype):
    assert cases.error(name, "cuda", dtype) <= 1


@pytest.mark.gpu
def test_a_grid_beyond_65535():
    from lean_arch.ops import sparse_attention, use
    from lean_arch.ops.patterns import local

    q, k, v = torch.randn(3, 1, 70_000, 64, 16, device="cuda", requires_grad=True)
    outs = []
    for backend in ("triton", "torch"):
        with use(backend):
            out = sparse_attention(q, k, v, local(8))
            outs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, want in zip(*outs):
        assert (got - want).norm() <= 2e-5 * want.norm()


@pytest.mark.gpu
def test_the_same_bits_twice():
    from lean_arch.ops.attention import kernels
    from lean_arch.ops.attention.problem import Problem
    from lean_arch.ops.patterns import causal

    q, k, v, grad = torch.randn(4, 1, 8, 1000, 64, device="cuda", dtype=torch.bfloat16)
    k, v, problem = k[:, :2], v[:, :2], Problem(causal(), 0.125)

    def run():
        out, lse = kernels.forward(q, k, v, problem)
        delta = (out.float() * grad.float()).sum(-1)
        return out, lse, *kernels.backward(grad, delta, q, k, v, lse, problem)

    assert all(torch.equal(one, two) for one, two in zip(run(), run()))


def test_bad_order_is_refused_by_name():
    from lean_arch.ops.attention import kernels
    from lean_arch.ops.attention.problem import Problem
    from lean_arch.ops.patterns import dense

    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"order is \(1, 2, 7\)"):
        kernels.forward(q, q, q, Problem(dense(), 1.0), order=torch.zeros(1, 2, 7, dtype=torch.int32))
    with pytest.raises(ValueError, match="float64"):
        kernels.forward(q.double(), q.double(), q.double(), Problem(dense(), 1.0))
