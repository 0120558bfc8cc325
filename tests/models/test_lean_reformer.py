"""lean_reformer: reversible to the bit with its hashing, memory flat in depth and linear in length, axial positions."""

import pytest
import torch
from rich.console import Console

import lean_arch
from lean_arch.blocks import LSHAttention
from lean_arch.models.lean_reformer import AxialPositions, near_square
from lean_arch.ops.attention import lsh
from lean_arch.registry import SEQUENCE_MODELS
from lean_arch.training.config import TrainConfig
from lean_arch.training.loop import train
from tests.models.sequences import (
    BAD_BATCHES,
    BAD_SIZES,
    assert_float64_logits_agree,
    assert_reversible_equals_stored,
    draw_tokens,
    of_trained_size,
)
from tests.ruler import peak_bytes


def build(**options):
    torch.manual_seed(0)
    sizes = {"seq_len": 64, "dim": 32, "depth": 3, "window": 5, "bucket_size": 8, "num_heads": 2}
    return of_trained_size(lean_arch.create_model("lean_reformer", **sizes | options))


def tokens(batch=4, length=50, seed=1):
    return draw_tokens(batch, length, seed)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("options", "batch"), [({}, 4), ({"drop_rate": 0.2}, 5), ({"tied": False, "mlp_chunks": 3}, 2), ({"depth": 10}, 1)]
)
def test_gradients_equal_stored_ones_bit_for_bit(options, batch, autocast):
    assert_reversible_equals_stored(build(**options), tokens(batch), autocast=autocast)


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_match_float64_logits(tied):
    """In one chunk, where rounding cannot move a token to another bucket."""
    assert_float64_logits_agree(build(tied=tied, bucket_size=25), tokens())


def changed(x, at):
    x = x.clone()
    x[:, at] = (x[:, at] + 1) % 256
    return x


@pytest.mark.parametrize("at", [0, 31, 49])
def test_a_later_token_changes_no_earlier_logits(at):
    model = build(bucket_size=25).eval()
    before, after = model(tokens()), model(changed(tokens(), at))
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at], after[:, at])


@pytest.mark.parametrize("at", [9, 49])
def test_beyond_one_chunk_it_changes_none_among_the_same_chunks(at, monkeypatch):
    model = build(n_hashes=3, bucket_size=4, depth=4).eval()
    orders, sort = [], lsh.sort_tokens
    monkeypatch.setattr(lsh, "sort_tokens", lambda *a: orders.append(sort(*a)) or orders[-1])
    before = model(tokens())
    assert len(orders) == 2
    monkeypatch.setattr(lsh, "sort_tokens", lambda *a: orders.pop(0))
    after = model(changed(tokens(), at))
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at], after[:, at])


def test_no_gradient_comes_from_a_later_token():
    model = build(depth=4, seq_len=200)
    given = []
    model.embed.register_forward_hook(lambda module, x, out: given.append(out) or out.retain_grad())
    model(tokens(1, 200))[0, 120].sum().backward()
    touched = given[0].grad[0].abs().sum(-1).nonzero()[:, 0]
    assert touched.max() == 120
    assert touched.min() < 100  # local layers alone reach 10 back


def test_evaluation_is_deterministic():
    model = build().eval()
    first = model(tokens())
    assert torch.equal(first, model(tokens()))
    torch.testing.assert_close(model(tokens()[1:2]), first[1:2], rtol=1e-4, atol=1e-4)  # whatever else is in the batch
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))


def test_layers_alternate():
    model = build(depth=5)
    assert [isinstance(block.f.attn, LSHAttention) for block in model.blocks] == [False, True] * 2 + [False]


def cost(depth=2, length=64, reversible=True):
    model = build(depth=depth, seq_len=length)
    model.set_reversible(reversible)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = tokens(4, length)
    return peak_bytes(lambda: model(x, targets=x).backward())


def test_depth_costs_nothing():
    lean, stored = ((cost(10, 128, r) - cost(4, 128, r)) / 6 for r in (True, False))
    assert lean <= 0.02 * stored


def test_memory_is_linear_in_the_length():
    assert cost(length=4096) <= 4.1 * cost(length=1024)


@pytest.mark.parametrize(("shape", "dim"), [((3, 7), 10), ((4, 4), 9), ((1, 5), 2)])
def test_axial_positions_are_their_definition(shape, dim):
    torch.manual_seed(0)
    positions = AxialPositions(shape, dim)
    torch.nn.init.normal_(positions.rows)
    torch.nn.init.normal_(positions.columns)
    assert positions.rows.shape[1] + positions.columns.shape[1] == dim
    for length in (1, shape[1], shape[0] * shape[1] - 1, shape[0] * shape[1]):
        got = positions(length)
        assert got.shape == (length, dim)
        for p in range(length):
            want = torch.cat((positions.rows[p // shape[1]], positions.columns[p % shape[1]]))
            assert torch.equal(got[p], want)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 100, 4096, 16_384, 65_536 + 1])
def test_the_default_grid_covers_the_length(length):
    rows, columns = near_square(length)
    assert length <= rows * columns < length + columns
    assert rows <= columns <= 4 * rows


def test_a_position_changes_what_its_token_gives():
    model = build(bucket_size=32).eval()
    same = torch.full((1, 64), 7)
    before = model(same)
    assert not torch.allclose(before[0, 5], before[0, 6])
    with torch.no_grad():
        model.positions.rows[3] += 1  # positions 24 to 31
    after = model(same)
    assert torch.equal(before[:, :24], after[:, :24])
    assert not torch.equal(before[:, 24:32], after[:, 24:32])


def test_what_is_longer_than_the_positions_is_refused():
    model = build(axial_shape=(5, 13))
    assert model(tokens(1, 65)).shape == (1, 65, 260)
    with pytest.raises(ValueError, match="66 tokens are more than the 5 x 13 axial positions, up to 65 work"):
        model(tokens(1, 66))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *BAD_SIZES,
        ({"window": 0}, "window 0 must be a whole number, 1 or more"),
        ({"axial_shape": (4, 8)}, r"axial_shape \(4, 8\) reaches 32 tokens, seq_len is 64"),
        ({"axial_shape": (0, 8)}, "axial_shape 0 must be a whole number, 1 or more"),
        ({"axial_shape": 64}, r"axial_shape 64 must be two numbers, \(rows, columns\)"),
        ({"axial_shape": (4, 4, 4)}, r"axial_shape \(4, 4, 4\) must be two numbers"),
        ({"n_hashes": 0}, "n_hashes 0"),
        ({"mlp_chunks": 0}, "mlp_chunks 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        build(**options)


@pytest.mark.parametrize(("tokens", "targets", "words"), BAD_BATCHES)
def test_input_that_does_not_fit_is_refused(tokens, targets, words):
    with pytest.raises(ValueError, match=words):
        build()(tokens, targets)


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setitem(SEQUENCE_MODELS.things, "small_reformer", build)
    (tmp_path / "some.txt").write_text("".join(chr(97 + i * i % 23) for i in range(6000)))
    given = {"arch": "small_reformer", "data": f"text:{tmp_path / 'some.txt'}", "seq_len": 64, "batch_size": 4}
    given |= {"max_steps": 3, "precision": "fp32", "drop_rate": 0.1}
    for name, options in (("whole", {}), ("parts", {"stop_after": 2}), ("parts", {"resume": True})):
        train(TrainConfig(**given, **options, output=str(tmp_path / name)), Console(quiet=True))
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
