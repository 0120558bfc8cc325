"""lean_bigbird: reversible to the bit, padding included, and memory linear in the length."""

import pytest
import torch
import torch.nn.functional as F

import lean_arch
from tests.models.sequences import (
    BAD_BATCHES,
    BAD_CLASSES,
    BAD_SIZES,
    assert_float64_logits_agree,
    assert_reversible_equals_stored,
    draw_tokens,
    long,
    of_trained_size,
)
from tests.ruler import peak_bytes


def build(**options):
    torch.manual_seed(0)
    sizes = {"dim": 32, "depth": 3, "window": 5, "block": 4, "global_tokens": 2}
    model = lean_arch.create_model("lean_bigbird", **sizes | options)
    model.blocks.least_chunk = 1  # so that small batches are cut as large ones are
    return of_trained_size(model)


def tokens(batch=4, length=39, seed=1):
    return draw_tokens(batch, length, seed)


LENGTHS = torch.tensor([39, 1, 17, 30, 22])


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize(
    ("options", "autocast"),
    [
        ({}, False),
        ({}, True),
        ({"drop_rate": 0.2, "attn_drop_rate": 0.1}, False),
        ({"chunks": 1}, True),
    ],
)
def test_gradients_equal_stored_ones_bit_for_bit(options, autocast, lengths):
    assert_reversible_equals_stored(build(**options), tokens(5), lengths, autocast=autocast)


@pytest.mark.parametrize("lengths", [None, LENGTHS[:4]])
def test_loss_and_gradients_match_float64_logits(lengths):
    assert_float64_logits_agree(build(), tokens(), lengths)


def test_who_sees_whom():
    """The window, the global tokens in both directions, and one random block, another in each layer."""
    model = build().double()
    x = torch.randn(1, 80, 32, dtype=torch.float64, requires_grad=True)
    beyond = []
    for block in model.blocks:
        y, seen = block.f(x), {}
        for query in (0, 1, 44, 47, 79):
            (grad,) = torch.autograd.grad(y[0, query].sum(), x, retain_graph=True)
            seen[query] = set(grad[0].abs().sum(-1).nonzero()[:, 0].tolist())
        assert seen[0] == seen[1] == set(range(80))
        expected = [{key for key in range(80) if key < 2 or abs(key - query) <= 5} for query in (44, 47, 79)]
        rest = [seen[query] - near for query, near in zip((44, 47, 79), expected, strict=True)]
        assert all(near <= seen[query] for query, near in zip((44, 47, 79), expected, strict=True))
        assert len({key // 4 for key in rest[0] | rest[1]}) <= 1  # queries of one block see the same one
        assert all(len(keys) <= 4 for keys in rest)
        beyond.append(frozenset().union(*rest))
    assert len(set(beyond)) > 1


@pytest.mark.parametrize("num_classes", [0, 3])
def test_padding_changes_nothing(num_classes):
    """Up to the length at which there is one random block more to draw from."""
    model = build(num_classes=num_classes).double()
    text = tokens(3, 37)
    want = model(text)
    got = model(F.pad(text, (0, 3), value=7), torch.full((3,), 37))
    torch.testing.assert_close(got if num_classes else got[:, :37], want, rtol=1e-9, atol=1e-9)
    other = model(F.pad(text, (0, 3), value=9), torch.full((3,), 37))
    assert torch.equal(got if num_classes else got[:, :37], other if num_classes else other[:, :37])


def test_two_padded_batches_may_be_under_way_at_once():
    model = build(chunks=2)
    lengths = LENGTHS[:4], LENGTHS[1:]
    want = [torch.autograd.grad(model(tokens(), own, targets=tokens()), model.embed.weight)[0] for own in lengths]
    losses = [model(tokens(), own, targets=tokens()) for own in lengths]
    got = [torch.autograd.grad(loss, model.embed.weight)[0] for loss in losses]
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_the_loss_of_a_classifier():
    model = build(num_classes=3).double()
    classes = torch.tensor([0, 2, 1, 1])
    logits = model(tokens(), LENGTHS[:4])
    assert logits.shape == (4, 3)
    loss = model(tokens(), LENGTHS[:4], targets=classes)
    torch.testing.assert_close(loss.double(), F.cross_entropy(logits, classes, reduction="sum"), rtol=1e-6, atol=0)


def step_peak(length, reversible=True, lengths=None, **options):
    model = build(**{"dim": 64, "window": 16, "block": 64, "chunks": 1} | options)
    model.set_reversible(reversible)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = tokens(1, length)
    return peak_bytes(lambda: model(x, lengths, targets=x).backward())


def test_memory_is_linear_in_the_length():
    assert step_peak(2048, depth=1) < 2.2 * step_peak(1024, depth=1)


@pytest.mark.parametrize("lengths", [None, torch.tensor([250])])
def test_depth_costs_nothing(lengths):
    lean, stored = ((step_peak(256, r, lengths, depth=6) - step_peak(256, r, lengths, depth=2)) for r in (True, False))
    assert lean <= 0.01 * stored


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *BAD_SIZES,
        ({"num_classes": -1}, "num_classes -1 must be a whole number, 0 or more"),
        ({"window": [4, 4, 4]}, r"window \[4, 4, 4\] must be a whole number"),
        ({"window": -1}, "window -1 must be a whole number, 0 or more"),
        ({"global_tokens": -1}, "global_tokens -1 must be"),
        ({"random_blocks": -1}, "random_blocks -1 must be"),
        ({"block": 0}, "block 0 must be a whole number, 1 or more"),
        ({"attn_drop_rate": 1}, "attn_drop_rate 1 must be a share"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        build(**options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((long(2, 4), torch.tensor([4])), r"key_lengths must be integers \(2,\)"),
        ((long(2, 4), [4, 4]), "key_lengths .* got list"),
        ((long(2, 4), torch.ones(2)), r"key_lengths .* got torch.float32"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        build()(*arguments)


@pytest.mark.parametrize(
    ("classes", "tokens", "targets", "words"),
    [*((0, *bad) for bad in BAD_BATCHES), *((3, *bad) for bad in BAD_CLASSES)],
)
def test_input_that_does_not_fit_is_refused(classes, tokens, targets, words):
    with pytest.raises(ValueError, match=words):
        build(num_classes=classes)(tokens, targets=targets)
