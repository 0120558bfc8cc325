"""Patterns and their tiles, against masks written independently."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_arch.ops.attention.tiles import compile_tiles
from lean_arch.ops.pattern_text import parse, spell
from lean_arch.ops.patterns import (
    Chunks,
    causal,
    dense,
    from_mask,
    global_tokens,
    local,
    random_blocks,
    strided,
)


def positions(nq, nk):
    return torch.arange(nq)[:, None] + nk - nq, torch.arange(nk)[None]


def leaves(nq, nk):
    """(pattern, bool mask) of each kind."""
    i, j = positions(nq, nk)
    drawn = torch.rand(nq, nk, generator=torch.Generator().manual_seed(nq * 1000 + nk)) < 0.2
    at = torch.zeros(nk + 1, dtype=torch.bool)
    at[[0, nk // 2]] = True
    first = lambda n: (j < n) | ((i >= 0) & (i < n))  # noqa: E731
    return [
        (dense(), torch.ones(nq, nk, dtype=torch.bool)),
        (causal(), j <= i),
        (local(5), (i - j).abs() <= 5),
        (local(40, 3), (j >= i - 40) & (j <= i + 3)),
        (global_tokens(0), torch.zeros(nq, nk, dtype=torch.bool)),
        (global_tokens(7), first(7)),
        (global_tokens(torch.tensor([nk // 2, 0])), at[j] | (at[i.clamp(min=0)] & (i >= 0))),
        (strided(6), (i - j) % 6 == 0),
        (Chunks(9, 2), (i // 9 - j // 9 >= 0) & (i // 9 - j // 9 <= 2)),
        (from_mask(drawn), drawn),
    ]


SHAPES = [(1, 1), (37, 37), (64, 200), (150, 90), (129, 257)]


def from_tiles(tiles, side):
    """The mask that the lists of one side say, and whether each list rises."""
    lists, masks = getattr(tiles, side), tiles.masks()
    rows, columns = -(-tiles.nq // tiles.tile_q), -(-tiles.nk // tiles.tile_k)
    seen = torch.zeros(rows * tiles.tile_q, columns * tiles.tile_k, dtype=torch.bool)
    for t, (first, end) in enumerate(zip(lists.starts.tolist(), lists.starts.tolist()[1:])):
        others = lists.others[first:end].tolist()
        assert others == sorted(set(others))
        for other, kind in zip(others, lists.masks[first:end].tolist()):
            r, c = (t, other) if side == "queries" else (other, t)
            one = masks[kind - 1] if kind else True
            seen[r * tiles.tile_q : (r + 1) * tiles.tile_q, c * tiles.tile_k : (c + 1) * tiles.tile_k] = one
    return seen[: tiles.nq, : tiles.nk]


@pytest.mark.parametrize(("nq", "nk"), SHAPES)
def test_masks_and_tiles(nq, nk):
    for pattern, mask in leaves(nq, nk):
        assert torch.equal(pattern.mask(nq, nk), mask), pattern
        for tile_q, tile_k in ((16, 32), (128, 64)):
            tiles = compile_tiles(pattern, nq, nk, tile_q, tile_k)
            for side in ("queries", "keys"):
                assert torch.equal(from_tiles(tiles, side), mask), (pattern, side)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 200), st.integers(1, 200))
def test_algebra(data, nq, nk):
    pick = st.sampled_from(leaves(nq, nk))
    (a, mask_a), (b, mask_b), (c, mask_c) = data.draw(pick), data.draw(pick), data.draw(pick)
    pattern, mask = (a | b) & c, (mask_a | mask_b) & mask_c
    assert torch.equal(pattern.mask(nq, nk), mask)
    tiles = compile_tiles(pattern, nq, nk, 32, 32)
    assert torch.equal(from_tiles(tiles, "queries"), mask)
    assert torch.equal(from_tiles(tiles, "keys"), mask)
    assert torch.equal(parse(spell(pattern)).mask(nq, nk), mask)


def test_text_written_by_hand():
    assert parse("(local(3) | global_tokens([2])) & causal()") == (local(3) | global_tokens([2])) & causal()


def test_random_blocks():
    pattern = random_blocks(2, 16, seed=4)
    mask = pattern.mask(100, 160)
    i, _ = positions(100, 160)
    for block in range(60 // 16, 10):
        rows = mask[(i[:, 0] // 16) == block]
        assert (rows == rows[:1]).all()
        assert rows[0].view(10, 16).all(1).sum() == rows[0].view(10, 16).any(1).sum() == 2
    assert torch.equal(mask, random_blocks(2, 16, seed=4).mask(100, 160))
    assert not torch.equal(mask, random_blocks(2, 16, seed=5).mask(100, 160))
    assert torch.equal(from_tiles(compile_tiles(pattern, 100, 160, 16, 32), "keys"), mask)
    assert random_blocks(50, 16).mask(40).all()  # fewer blocks than wanted: all


def test_a_band_takes_a_handful_of_masks_whatever_its_length():
    small, large = (compile_tiles(local(100) & causal(), n, n) for n in (2**13, 2**17))
    assert len(small.bits) == len(large.bits) < 8
    assert len(large.queries.others) < 17 * len(small.queries.others)
    assert abs((local(100) & causal()).density(2**17) * 2**17 / 192 - 1) < 0.01  # three tiles of 64 a row


def test_density_counts_the_tiles():
    assert dense().density(100, 70) == 1
    assert global_tokens(0).density(100) == 0
    assert causal().density(128) == 0.75  # three of four tiles of 64


def test_equal_patterns_are_the_same():
    assert local(4) | causal() == local(4, 4) | causal()
    assert hash(local(4) & strided(2)) == hash(local(4) & strided(2))
    assert compile_tiles(local(4), 50, 50) is compile_tiles(local(4, 4), 50, 50)
    mask = torch.ones(3, 3, dtype=torch.bool)
    pattern = from_mask(mask)
    for same in (from_mask(mask), copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert (same, hash(same), str(same)) == (pattern, hash(pattern), str(pattern))
        assert same | causal() == pattern | causal()
    assert from_mask(mask) != from_mask(mask.tril())


def test_a_mask_is_copied():
    mask = torch.ones(3, 3, dtype=torch.bool)
    pattern = from_mask(mask)
    mask.zero_()
    assert pattern.mask(3).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: local(-1), "local left -1 must be a whole number, 0 or more"),
        (lambda: local(3, -2), "local right -2"),
        (lambda: local(2.5), "local left 2.5"),
        (lambda: global_tokens(-1), "global_tokens -1"),
        (lambda: global_tokens([1, -3]), "must be positions"),
        (lambda: strided(0), "strided 0 must be a whole number, 1 or more"),
        (lambda: random_blocks(1, 4, "x"), "random_blocks seed 'x' must be a whole number, 0 or more"),
        (lambda: random_blocks(0), "random_blocks count 0"),
        (lambda: random_blocks(1, 0), "random_blocks block 0"),
        (lambda: local(3).mask(-1), "nq -1 must be a whole number, 1 or more"),
        (lambda: local(3).mask(2.5), "nq 2.5"),
        (lambda: local(3).mask(4, 0), "nk 0"),
        (lambda: local(3).density(0), "nq 0"),
        (lambda: local(3).show(0), "nq 0"),
        (lambda: parse("local(3"), r"pattern 'local\(3' does not say what is seen; .* does"),
        (lambda: parse("window(3)"), r"pattern 'window\(3\)'"),
        (lambda: parse("local(3) + causal()"), "does not say what is seen"),
        (lambda: parse("local(-3)"), "does not say what is seen"),
        (lambda: parse(3), "pattern 3 does not say"),
        (lambda: from_mask(torch.ones(3, 3)), "from_mask takes a bool tensor"),
        (lambda: from_mask(torch.ones(3, dtype=torch.bool)), "from_mask takes a bool tensor"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_only_patterns_are_joined():
    with pytest.raises(TypeError, match=r"cannot be joined with \| or &"):
        local(3) | 4


def test_show_draws_the_mask():
    axes = (local(3) & causal()).show(20)
    (image,) = axes.images
    assert torch.equal(torch.as_tensor(image.get_array().data).bool(), (local(3) & causal()).mask(20))
    assert axes.get_title() == "(local(3, 3) & causal())"
