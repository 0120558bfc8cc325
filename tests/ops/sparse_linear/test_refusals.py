"""What sparse updates refuse, each in a sentence that names the argument."""

import pytest
import torch

from lean_arch.ops.sparse_linear import (
    Blocks,
    Columns,
    Entries,
    Rows,
    sparse_conv1d,
    sparse_conv2d,
    sparse_embedding,
    sparse_linear,
)

SHAPE = (8, 12)


def at(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Columns(at(3, 12)), r"Columns.index holds 12, but there are 12 inputs of the weight \(8, 12\): 0 to 11"),
        (Columns(at(-1)), "Columns.index holds -1"),
        (Columns(at(3, 3)), "Columns.index holds a number twice"),
        (Columns(torch.tensor([1.0])), "Columns.index must be a tensor of int64 with one dimension, got torch.float32"),
        (Columns([1]), "Columns.index must be a tensor of int64 with one dimension, got list"),
        (Columns(at(1)[None]), r"Columns.index must be .* got torch.int64 \(1, 1\)"),
        (Rows(at(8)), "Rows.index holds 8, but there are 8 outputs"),
        (Rows(at(2, 2)), "Rows.index holds a number twice"),
        (
            Blocks(at(1), at(2), (4, 5)),
            "Blocks.cols holds 2, but there are 2 blocks of 5 that fit into 12 of the weight",
        ),
        (Blocks(at(2), at(0), (3, 4)), "Blocks.rows holds 2, but there are 2 blocks of 3 that fit into 8"),
        (Blocks(at(0, 1), at(0), (2, 2)), "Blocks.rows has 2 numbers and Blocks.cols 1"),
        (Blocks(at(1, 1), at(0, 0), (2, 2)), "name a block twice"),
        (Blocks(at(0), at(0), (2,)), r"Blocks.size \(2,\) must be two whole numbers"),
        (Blocks(at(0), at(0), (2, 0)), r"Blocks.size \(2, 0\) must be two whole numbers"),
        (Entries(at(5, 96)), "Entries.index holds 96, but there are 96 places in the weight"),
        (Entries(at(5, 4)), "Entries.index must be ascending without repeats"),
        (Entries(at(4, 4)), "Entries.index must be ascending without repeats"),
    ],
)
def test_structures(structure, message):
    with pytest.raises(ValueError, match=message):
        structure.check(SHAPE)
    if isinstance(structure, Columns) and not isinstance(structure.index, torch.Tensor):
        return
    values = torch.zeros(structure.values_shape(SHAPE) if len(getattr(structure, "size", "ab")) == 2 else 1)
    with pytest.raises(ValueError, match=message):
        sparse_linear(torch.zeros(2, 12), torch.zeros(SHAPE), None, [(values, structure)])


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Columns(at(4)), "Columns.index holds 4, but there are 4 groups"),
        (Rows(at(0, 0)), "Rows.index holds a number twice"),
        (Blocks(at(0), at(0), (1, 1)), "Blocks do not go with groups=4"),
        (Entries(at(8 * 3 * 4)), "Entries.index holds 96"),
    ],
)
def test_structures_of_grouped_convolutions(structure, message):
    weight, values = torch.zeros(8, 3, 2, 2), torch.zeros(1)
    with pytest.raises(ValueError, match=message):
        sparse_conv2d(torch.zeros(1, 12, 5, 5), weight, None, [(values, structure)], groups=4)


FINE = (torch.zeros(8, 1), Columns(at(0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 11)}, r"x must be a tensor \(..., 12\) for weight \(8, 12\), got \(2, 11\)"),
        ({"x": torch.zeros(2, 12).long()}, "x is torch.int64"),
        ({"x": torch.zeros(2, 12).half()}, "weight is torch.float32, but x is torch.float16"),
        ({"weight": torch.zeros(8, 12, 1)}, r"weight must be a tensor \(O, C\)"),
        ({"weight": torch.zeros(SHAPE, requires_grad=True)}, "weight requires a gradient, but gets none here"),
        ({"bias": torch.zeros(7)}, r"bias must be a tensor \(8,\), got \(7,\)"),
        ({"bias": torch.zeros(8).double()}, "bias is torch.float64, but x is torch.float32"),
        ({"updates": [FINE, (torch.zeros(8, 2), Columns(at(0)))]}, r"values of updates\[1\] must be a float tensor"),
        ({"updates": [(torch.zeros(8, 1).long(), Columns(at(0)))]}, r"values of updates\[0\] must be a float tensor"),
        ({"updates": [(torch.zeros(8, 1), at(0))]}, r"updates\[0\] has Tensor for a structure"),
        ({"updates": [(torch.zeros(8, 1, device="meta"), Columns(at(0)))]}, r"values of updates\[0\] is on meta"),
        ({"updates": [(torch.zeros(8, 1), Columns(at(0).to("meta")))]}, r"index of updates\[0\] is on meta"),
    ],
)
def test_linear(change, message):
    given = {"x": torch.zeros(2, 12), "weight": torch.zeros(SHAPE), "bias": torch.zeros(8), "updates": [FINE]} | change
    with pytest.raises(ValueError, match=message):
        sparse_linear(**given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(12, 5, 5)}, r"x must be a tensor \(B, 12, H, W\)"),
        ({"x": torch.zeros(1, 11, 5, 5)}, r"x must be a tensor \(B, 12, H, W\)"),
        ({"x": torch.zeros(1, 12, 2, 5)}, "weight spans 3 numbers of x's height, which is 2 with padding 0"),
        ({"weight": torch.zeros(8, 12)}, r"weight must be a tensor \(O, C / groups, kh, kw\)"),
        ({"groups": 3}, "groups 3 must be a whole number that divides the 8 outputs"),
        ({"groups": 0}, "groups 0 must be"),
        ({"stride": 0}, "stride 0 must be"),
        ({"stride": (1, 2, 3)}, "stride"),
        ({"padding": -1}, "padding -1 must be"),
        ({"padding": "reflect"}, "padding 'reflect' does not exist"),
        ({"padding": "same", "stride": 2}, "padding 'same' needs stride 1, got 2"),
        ({"dilation": 1.0}, "dilation 1.0 must be"),
    ],
)
def test_convolution(change, message):
    given = {"x": torch.zeros(1, 12, 5, 5), "weight": torch.zeros(8, 12, 3, 3), "bias": None, "updates": []} | change
    with pytest.raises(ValueError, match=message):
        sparse_conv2d(**given)


def test_convolution_in_one_dimension():
    with pytest.raises(ValueError, match=r"x \(B, C, L\) and weight \(O, C, k\) have 3 dimensions, got 2 and 3"):
        sparse_conv1d(torch.zeros(12, 5), torch.zeros(8, 12, 3), None, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(2)}, "ids must be a tensor of int64 or int32, got torch.float32"),
        ({"weight": torch.zeros(8)}, r"weight must be a tensor \(V, D\)"),
        ({"padding_idx": 8}, "padding_idx 8 must be a row of weight, -8 to 7"),
        ({"updates": [(torch.zeros(2, 12), Rows(at(1)))]}, r"values of updates\[0\] must be a float tensor \(1, 12\)"),
    ],
)
def test_embedding(change, message):
    given = {"ids": at(0, 1), "weight": torch.zeros(SHAPE), "updates": []} | change
    with pytest.raises(ValueError, match=message):
        sparse_embedding(**given)


def test_ids_out_of_range():
    with pytest.raises(IndexError):
        sparse_embedding(at(8), torch.zeros(SHAPE), [(torch.zeros(1, 12), Rows(at(1)))])


def test_an_update_without_values_changes_nothing():
    empty = at()
    x, weight = torch.randn(2, 12, 4, 4), torch.randn(8, 12, 3, 3)
    for structure in (Columns(empty), Rows(empty), Blocks(empty, empty, (2, 2)), Entries(empty)):
        values = torch.zeros(structure.values_shape(weight.shape), requires_grad=True)
        out = sparse_conv2d(x, weight, None, [(values, structure)])
        assert torch.equal(out, torch.nn.functional.conv2d(x, weight))
