"""lean_lm: causal, reversible to the bit, and generating from its cache what the whole sequence gives."""

import pytest
import torch
import torch.nn.functional as F

import lean_arch
from tests.models.sequences import (
    BAD_BATCHES,
    BAD_SIZES,
    assert_float64_logits_agree,
    assert_reversible_equals_stored,
    draw_tokens,
    long,
    of_trained_size,
)
from tests.ruler import peak_bytes


def build(name="lean_lm", **options):
    torch.manual_seed(0)
    model = lean_arch.create_model(name, **{"dim": 32, "depth": 3, "global_every": 2, "window": 5} | options)
    model.blocks.least_chunk = 1  # so that small batches are cut as large ones are
    return of_trained_size(model)


def tokens(batch=4, length=23, seed=1):
    return draw_tokens(batch, length, seed)


@pytest.mark.parametrize("at", [0, 9, 22])
def test_a_later_token_changes_no_earlier_logits(at):
    model = build()
    one = tokens()
    other = one.clone()
    other[:, at] = (other[:, at] + 1) % 256
    before, after = model(one), model(other)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at], after[:, at])


@pytest.mark.parametrize(
    ("options", "seen"), [({"global_every": 9, "depth": 2}, 10), ({"global_every": 2, "depth": 2}, 22)]
)
def test_how_far_back_a_token_sees(options, seen):
    """Two local layers of 5 see 10 back; one global layer sees all."""
    model = build(**options)
    x = model.embed(tokens(1)).detach().requires_grad_()
    y = model._fuse(*model.blocks((x, x)))
    y[0, -1].sum().backward()
    touched = x.grad[0].abs().sum(-1).nonzero()[0].item()
    assert touched == 22 - seen


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("options", "batch"),
    [({}, 4), ({"drop_rate": 0.2}, 5), ({"tied": False, "chunks": 1}, 3), ({"depth": 12}, 1)],
)
def test_gradients_equal_stored_ones_bit_for_bit(options, batch, autocast):
    assert_reversible_equals_stored(build(**options), tokens(batch), autocast=autocast)


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_match_float64_logits(tied):
    assert_float64_logits_agree(build(tied=tied), tokens())


def test_label_smoothing_is_that_of_cross_entropy():
    model = build()
    got = model(tokens(), targets=tokens(seed=2), label_smoothing=0.1)
    want = F.cross_entropy(
        model(tokens()).flatten(0, 1), tokens(seed=2).flatten(), reduction="sum", label_smoothing=0.1
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_depth_costs_nothing():
    def cost(depth, reversible):
        model = build(depth=depth, global_every=3, chunks=1)
        model.set_reversible(reversible)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = tokens(8, 64)
        return peak_bytes(lambda: model(x, targets=x).backward())

    lean, stored = ((cost(12, r) - cost(3, r)) / 9 for r in (True, False))
    assert lean <= 0.01 * stored


@pytest.mark.parametrize("autocast", [False, True])
def test_generating_gives_what_the_whole_sequence_gives(autocast):
    model = build(depth=4).eval()
    prompt = tokens(3, 7)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = model.generate(prompt, 20, temperature=0)
        logits = model(got).float()
    assert torch.equal(got[:, :7], prompt)
    likeliest = logits[:, 6:-1].max(-1).values
    chosen = logits[:, 6:-1].gather(-1, got[:, 7:, None])[..., 0]
    torch.testing.assert_close(chosen, likeliest, rtol=0, atol=0.05 if autocast else 1e-4)
    if not autocast:
        assert torch.equal(got[:, 7:], logits[:, 6:-1].argmax(-1))


def test_the_cache_gives_the_features_of_the_whole():
    from lean_arch.blocks import KeyValues

    model = build(depth=4).double().eval()
    x = tokens(2, 40)
    caches = [KeyValues() for _ in model.blocks]
    with torch.no_grad():
        parts = torch.cat([model._continue(part, caches) for part in x.split([11, 1, 1, 20, 7], 1)], 1)
        torch.testing.assert_close(parts, model.forward_features(x), rtol=1e-8, atol=1e-8)
    assert [cache.k.shape[2] for cache in caches] == [5, 40, 5, 40]


def test_drawing_follows_the_generator_and_top_k():
    model = build().eval()
    prompt = tokens(2, 5)

    def draw(seed, **options):
        return model.generate(prompt, 12, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1, top_k=1), model.generate(prompt, 12, temperature=0))
    assert torch.equal(model.generate(prompt, 0), prompt)
    few = draw(3, top_k=3)
    logits = model(few)
    ranks = (logits[:, 4:-1] > logits[:, 4:-1].gather(-1, few[:, 5:, None])).sum(-1)
    assert ranks.max() <= 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(((tokens, 3), words) for tokens, targets, words in BAD_BATCHES if targets is None),
        ((long(1, 2), -1), "^max_new_tokens -1 must be a whole number, 0 or more$"),
        ((long(1, 2), 2.5), "^max_new_tokens 2.5 must be a whole number, 0 or more$"),
        ((long(1, 2), 1, -0.5), "^temperature -0.5 must be a finite number, 0 or more$"),
        ((long(1, 2), 1, float("nan")), "^temperature nan must be a finite number, 0 or more$"),
        ((long(1, 2), 1, 1.0, 0), "^top_k 0 must be a whole number, 1 or more$"),
    ],
)
def test_what_cannot_be_generated_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        build().generate(*arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *BAD_SIZES,
        ({"window": 0}, "window 0 must be a whole number, 1 or more"),
        ({"window": [4, 4]}, r"window \[4, 4\] must be a whole number"),
        ({"global_every": 0}, "global_every 0 must be a whole number, 1 or more"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        build(**options)


@pytest.mark.parametrize(("tokens", "targets", "words"), BAD_BATCHES)
def test_input_that_does_not_fit_is_refused(tokens, targets, words):
    with pytest.raises(ValueError, match=words):
        build()(tokens, targets)


def test_tied_weights_are_one():
    model = build()
    assert model.head.weight is model.embed.weight
    untied = build(tied=False)
    assert untied.head.weight is not untied.embed.weight
