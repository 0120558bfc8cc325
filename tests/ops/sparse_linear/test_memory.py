"""Sparse updates: nothing as large as the weight is allocated, and what is kept for the backward pass is as said."""

import pytest
import torch

from lean_arch.ops.sparse_linear import Blocks, Columns, Entries, Rows, sparse
from tests.ops.sparse_linear.problems import Problem
from tests.ruler import allocations, peak_bytes

KINDS = "columns", "rows", "blocks", "entries"


def one_percent(kind, shape):
    outputs, inputs = shape[:2]
    if kind == "columns":
        return Columns(torch.arange(0, inputs, 100))
    if kind == "rows":
        return Rows(torch.arange(0, outputs, 100))
    if kind == "blocks":
        index = torch.arange(0, outputs * inputs // 256, 100)
        return Blocks(index // (inputs // 16), index % (inputs // 16), (16, 16))
    return Entries(torch.arange(0, torch.Size(shape).numel(), 100))


def large(layer, kind, x, weight, *options, dtype=torch.float32):
    structure = one_percent(kind, weight)
    values = torch.zeros(structure.values_shape(weight)).requires_grad_()
    tensors = (torch.randn(shape).to(dtype) for shape in (x, weight, weight[:1]))
    x, weight, bias = tensors
    return Problem(layer, x.requires_grad_(), weight, bias, [(values, structure)], options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layer", "x", "weight", "options", "dtype"),
    [
        ("linear", (16, 2048), (2048, 2048), (), torch.float32),
        ("linear", (64, 2048), (1024, 2048), (), torch.bfloat16),
        ("conv2d", (2, 512, 7, 7), (512, 512, 3, 3), (1, 1), torch.float32),
        ("conv2d", (2, 512, 7, 7), (512, 512, 3, 3), (1, 1), torch.bfloat16),
        ("embedding", (64,), (32768, 64), (), torch.float32),
    ],
)
def test_nothing_is_as_large_as_the_weight(layer, x, weight, options, dtype, kind):
    given = large(layer, kind, x, weight, *options, dtype=dtype)
    if layer == "embedding":
        given.x = torch.arange(64)
    given.ours().sum().backward()  # which remembers what it derives from the indices
    dense = torch.Size(weight).numel() * 4
    largest = max(allocations(lambda: given.ours().square().sum().backward()))
    assert largest < (0.05 if layer == "embedding" else 0.25) * dense


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept(kind, autocast):
    given = large("linear", kind, (64, 512), (256, 512))
    held = [given.x, given.weight, given.bias, given.updates[0][0]]
    kept, storages = {}, {t.untyped_storage().data_ptr() for t in held}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", enabled=autocast):
        out = given.ours()
    each = 64 * (2 if autocast else 4)
    structure = given.updates[0][1]
    wanted = {
        "columns": len(structure.index) * each if kind == "columns" else 0,
        "blocks": len(structure.cols.unique()) * 16 * each if kind == "blocks" else 0,
        "rows": 512 * each * autocast,  # x itself, which somebody holds anyway
        "entries": 512 * each * autocast,
    }[kind]
    assert sum(kept.values()) == wanted
    del out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ["linear", "conv2d"])
def test_no_second_output_and_no_second_input_gradient(layer, kind, monkeypatch):
    """Beside the result and the gradients a step takes little, where a sum of two layers takes both once more."""
    monkeypatch.setattr(sparse, "SCRATCH", {True: 2**17, False: 2**17})
    if layer == "linear":
        given = large(layer, kind, (8192, 256), (256, 256))
    else:
        given = large(layer, kind, (64, 64, 28, 28), (64, 64, 1, 1))
    out = given.ours()
    upstream = torch.randn_like(out)
    forward = peak_bytes(given.ours)
    backward = peak_bytes(lambda: torch.autograd.grad(out, given.trained, upstream, retain_graph=True))
    share = 1.4 if layer == "linear" else 1.6  # of a convolution the library lays out a few images anew
    assert forward < share * out.nbytes
    assert backward < share * given.x.nbytes
