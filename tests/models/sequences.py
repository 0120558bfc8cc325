"""What the tests of the sequence models share: small batches, weights that matter, and what holds for all of them."""

import copy

import torch
import torch.nn.functional as F

IGNORED = -100


def of_trained_size(model):
    """Matrices of a trained size, or attention would hardly matter."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def draw_tokens(batch, length, seed=1):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


def targets_of(tokens):
    """Others than the tokens, with gaps."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(256, tokens.shape, generator=generator)
    return targets.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.4, IGNORED)


def gradients(model, tokens, *more, reversible=True, autocast=False):
    """(loss, {name: gradient}) of `model(tokens, *more, targets=...)`, its dropout seeded."""
    model.set_reversible(reversible)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens, *more, targets=targets_of(tokens))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_reversible_equals_stored(model, tokens, *more, autocast=False):
    """Bit for bit."""
    lean, stored = (gradients(model, tokens, *more, reversible=r, autocast=autocast) for r in (True, False))
    assert torch.equal(lean[0], stored[0])
    for name, grad in stored[1].items():
        assert grad is not None, name
        assert torch.equal(lean[1][name], grad), name


def assert_float64_logits_agree(model, tokens, *more):
    """The loss and every gradient, by relative error, are those of the same model's logits in float64."""
    loss, grads = gradients(model, tokens, *more)
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    logits = exact(tokens, *more).flatten(0, 1)
    want = F.cross_entropy(logits, targets_of(tokens).flatten(), reduction="sum")
    want.backward()
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-5, atol=0)
    for name, parameter in exact.named_parameters():
        error = (grads[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"


def long(*shape):
    return torch.zeros(shape, dtype=torch.int64)


# what every model refuses: (arguments of its constructor, words) and (tokens, targets, words)
BAD_SIZES = [
    ({"depth": 0}, "depth 0 must be a whole number, 1 or more"),
    ({"depth": 1.5}, "depth 1.5 must be a whole number"),
    ({"seq_len": 0}, "seq_len 0 must be a whole number, 1 or more"),
    ({"vocab_size": -1}, "vocab_size -1 must be a whole number, 1 or more"),
    ({"num_heads": 0}, "num_heads 0 must be a whole number, 1 or more"),
    ({"num_heads": -2}, "num_heads -2 must be a whole number, 1 or more"),
    ({"num_heads": 3}, "dim 32 is not a multiple of num_heads 3"),
    ({"dim": 8, "num_heads": 2}, "dim 8 gives 2 heads of 4 channels; 8 to 256 work"),
    ({"window": "wide"}, "window 'wide' must be a whole number"),
    ({"mlp_ratio": -1}, "mlp_ratio -1 must be a number that makes 1 or more of dim 32"),
    ({"mlp_ratio": 0}, "mlp_ratio 0 must be a number"),
    ({"mlp_ratio": float("nan")}, "mlp_ratio nan must be a number"),
    ({"drop_rate": 1.5}, "drop_rate 1.5 must be a share, 0 or more and less than 1"),
]
BAD_BATCHES = [
    (long(4), None, r"tokens must be a tensor \(B, N\) of int64 or int32, got torch.int64 \(4,\)"),
    (torch.zeros(2, 4), None, r"tokens must be a tensor .* got torch.float32 \(2, 4\)"),
    ([[1, 2]], None, "tokens must be a tensor .* got list"),
    (long(2, 0), None, r"tokens are \(2, 0\); \(B, N\) with N at least 1 works"),
    (long(2, 4) + 260, None, "tokens go from 260 to 260; vocab_size 260 has 0 to 259"),
    (long(2, 4) - 1, None, "tokens go from -1 to -1; vocab_size 260 has 0 to 259"),
    (long(2, 4), long(2, 3), r"targets must be a tensor \(2, 4\) of int64, got torch.int64 \(2, 3\)"),
    (long(2, 4), torch.zeros(2, 4), r"targets must be a tensor \(2, 4\) of int64, got torch.float32 \(2, 4\)"),
    (long(2, 4), long(2, 4) + 260, "target 260 is out of range"),
]
BAD_CLASSES = [  # of a classifier with 3
    (long(2, 4), long(2, 4), r"targets must be a tensor \(2,\) of int64, got torch.int64 \(2, 4\)"),
    (long(2, 4), long(2) + 3, "targets go from 3 to 3; num_classes 3 has 0 to 2"),
]
