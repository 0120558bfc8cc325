"""lean_longformer: Hugging Face's outputs and gradients from its weights, and memory linear in the length."""

import copy

import pytest
import torch
import torch.nn.functional as F

import lean_arch
from lean_arch.memory import apply_checkpointing
from lean_arch.models.lean_longformer import LeanLongformer
from tests.models.sequences import BAD_BATCHES, BAD_CLASSES, BAD_SIZES, long
from tests.ruler import peak_bytes

IGNORED = -100
PAD = 1  # of Hugging Face's model
LENGTH = 53


def build(**options):
    torch.manual_seed(0)
    model = lean_arch.create_model("lean_longformer", **{"dim": 32, "depth": 2, "window": 5, "seq_len": 64} | options)
    return of_trained_size(model)


def of_trained_size(model):
    """Weights at which attention matters and no bias is zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def huggingface(kind="LongformerModel", **options):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 90,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 72,
        "attention_window": [8, 4, 16],
        "max_position_embeddings": 80,
        "pad_token_id": PAD,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-6,
    }
    model = getattr(transformers, kind)(transformers.LongformerConfig(**sizes | options))
    return of_trained_size(model).eval()


def batch(padded, global_):
    """tokens (3, 53) and the masks asked for: padding on either side, global tokens anywhere, of differing number."""
    tokens = torch.randint(2, 90, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    attention_mask = global_mask = None
    if padded:
        attention_mask = torch.ones(3, LENGTH, dtype=torch.int64)
        attention_mask[0, 40:] = attention_mask[1, :7] = attention_mask[2, 20:22] = 0
        tokens[attention_mask == 0] = PAD
    if global_:
        global_mask = torch.zeros(3, LENGTH, dtype=torch.int64)
        global_mask[0, [0, 20, 45]] = global_mask[1, [9, 10, 11, 30, 52]] = 1
    return tokens, attention_mask, global_mask


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("global_", [False, True])
def test_outputs_and_gradients_are_those_of_hugging_face(padded, global_):
    theirs = huggingface()  # in float32: in float64 its gradients of padding are NaN
    ours = LeanLongformer.from_huggingface(theirs).double()
    tokens, attention_mask, global_mask = batch(padded, global_)
    want = theirs(tokens, attention_mask=attention_mask, global_attention_mask=global_mask).last_hidden_state
    got = ours.forward_features(tokens, attention_mask, global_mask)
    seen = torch.ones(3, LENGTH, dtype=torch.bool) if attention_mask is None else attention_mask == 1
    assert error(got[seen], want[seen]) < 1e-5
    upstream = torch.randn(want.shape) * seen[..., None]
    (want * upstream).sum().backward()
    (got * upstream).sum().backward()
    grads = theirs_by_our_names(theirs)
    compared = 0
    for name, parameter in ours.named_parameters():
        if parameter.grad is None or name.endswith(("key.bias", "key_global.bias")):  # which no softmax notices
            assert name.startswith(("head", "bias")) or "key" in name or ("global" in name and not global_), name
            continue
        compared += 1
        assert error(grads[name], parameter.grad) < 1e-4, name
    assert compared == 5 - 1 + 3 * (15 + (5 if global_ else 0))


def theirs_by_our_names(model):
    """The gradients of Hugging Face's model."""
    from lean_arch.models.lean_longformer import renamed

    grads = renamed({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, PAD)
    grads["positions.weight"] = model.embeddings.position_embeddings.weight.grad[PAD:]
    return grads


def test_outputs_in_float32():
    theirs = huggingface()
    ours = LeanLongformer.from_huggingface(theirs)
    tokens, attention_mask, global_mask = batch(True, True)
    want = theirs(tokens, attention_mask=attention_mask, global_attention_mask=global_mask).last_hidden_state
    got = ours.forward_features(tokens, attention_mask, global_mask)
    assert error(got[attention_mask == 1], want[attention_mask == 1]) < 1e-5


def test_weights_load_from_a_state_dict_too():
    theirs = huggingface(attention_window=8)
    ours = LeanLongformer(
        90, seq_len=78, dim=48, depth=3, num_heads=4, window=4, mlp_ratio=1.5, pad_id=PAD, eps=1e-6, global_tokens=0
    )
    ours.load_huggingface(theirs.state_dict())
    tokens, *_ = batch(False, False)
    assert error(ours.forward_features(tokens), theirs(tokens).last_hidden_state) < 1e-5


def test_the_head_for_hidden_tokens_loads():
    theirs = huggingface("LongformerForMaskedLM")
    ours = LeanLongformer.from_huggingface(theirs)
    tokens, attention_mask, global_mask = batch(True, True)
    want = theirs(tokens, attention_mask=attention_mask, global_attention_mask=global_mask).logits
    got = ours(tokens, attention_mask, global_mask)
    assert error(got[attention_mask == 1], want[attention_mask == 1]) < 1e-5


def test_the_classifier_loads():
    theirs = huggingface("LongformerForSequenceClassification", num_labels=5)
    ours = LeanLongformer.from_huggingface(theirs, num_classes=5, global_tokens=1)
    tokens, attention_mask, _ = batch(True, False)
    attention_mask[:] = 1
    assert error(ours(tokens, attention_mask), theirs(tokens, attention_mask=attention_mask).logits) < 1e-5


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"depth": 2}, "layers.2.*depth is 2"),
        ({"depth": 4}, "source lacks layers.3"),
        ({"seq_len": 50}, r"positions.weight of \(79, 48\), but ours is \(51, 48\)"),
    ],
)
def test_weights_of_other_sizes_are_refused_and_nothing_changes(sizes, words):
    theirs = huggingface()
    ours = LeanLongformer(90, **{"seq_len": 78, "dim": 48, "depth": 3, "mlp_ratio": 1.5, "pad_id": PAD} | sizes)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=words):
        ours.load_huggingface(theirs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_an_activation_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="hidden_act 'relu'"):
        LeanLongformer.from_huggingface(huggingface(hidden_act="relu"))


@pytest.mark.parametrize("num_classes", [0, 3])
def test_padding_changes_nothing(num_classes):
    model = build(num_classes=num_classes).double()
    tokens = torch.randint(256, (2, 30))
    global_mask = torch.zeros(2, 30)
    global_mask[0, [0, 17]] = global_mask[1, 29] = 1
    want = model(tokens, global_attention_mask=global_mask)
    attention_mask = F.pad(torch.ones(2, 30), (0, 21))
    longer = F.pad(tokens, (0, 21), value=7), attention_mask, F.pad(global_mask, (0, 21), value=1)
    got = model(*longer)
    assert error(got if num_classes else got[:, :30], want) < 1e-12


def test_who_sees_whom():
    """One layer, no mask: the window, and the first token in both directions."""
    model = build(depth=1).double()
    tokens = torch.randint(256, (1, 40))
    x = model.norm(model.embed(tokens)).detach().requires_grad_()
    sight = model._look(tokens, None, None)
    y = model.layers[0].attention(x, sight)
    for query in (0, 1, 8, 39):
        (grad,) = torch.autograd.grad(y[0, query].sum(), x, retain_graph=True)
        seen = set(grad[0].abs().sum(-1).nonzero()[:, 0].tolist())
        near = {key for key in range(40) if abs(query - key) <= 5}
        assert seen == (set(range(40)) if query == 0 else near | {0})


def test_loss_and_gradients_match_float64_logits():
    model = build()
    tokens = torch.randint(256, (3, 41))
    targets = tokens.masked_fill(torch.rand(tokens.shape) < 0.7, IGNORED)
    loss = model(tokens, targets=targets, label_smoothing=0.1)
    loss.backward()
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    logits = exact(tokens).flatten(0, 1)
    want = F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=0.1)
    want.backward()
    assert error(loss, want) < 1e-5
    for name, parameter in model.named_parameters():
        reference = exact.get_parameter(name).grad
        if name.endswith(("key.bias", "key_global.bias")):
            assert parameter.grad.norm() < 1e-4 * loss
        else:
            assert error(parameter.grad, reference) < 1e-4, name


def test_the_loss_of_a_classifier():
    model = build(num_classes=3).double()
    tokens, classes = torch.randint(256, (4, 20)), torch.tensor([0, 2, 1, 1])
    logits = model(tokens)
    assert logits.shape == (4, 3)
    torch.testing.assert_close(
        model(tokens, targets=classes).double(), F.cross_entropy(logits, classes, reduction="sum"), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_from_outside_leaves_gradients_as_they_are(dropout):
    model = build(drop_rate=dropout, attn_drop_rate=dropout)
    tokens = torch.randint(256, (2, 30))

    def gradients():
        model.zero_grad()
        torch.manual_seed(3)
        model(tokens, targets=tokens).backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients()
    apply_checkpointing(model, "all")
    assert all(torch.equal(got, w) for got, w in zip(gradients(), want, strict=True))


def step_peak(length, **options):
    model = build(**{"dim": 64, "depth": 3, "seq_len": length, "window": 16} | options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(256, (1, length))
    return peak_bytes(lambda: model(tokens, targets=tokens).backward())


def test_memory_is_linear_in_the_length():
    assert step_peak(2048, depth=1) < 2.2 * step_peak(1024, depth=1)


def test_a_layer_keeps_its_activations_once():
    """q, k, v, out, two sums and what their norms gave: 8 tensors of (N, C)."""
    length, dim = 1024, 64
    layer = (step_peak(length, depth=4) - step_peak(length, depth=2)) / 2
    assert layer < 8.5 * length * dim * 4


def test_compiles_whole():
    """Its embedding, masks, chunked middle and loss."""
    model = build(num_classes=0)
    tokens = torch.randint(256, (2, 40))
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(tokens, targets=tokens).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(error(a, b) < 1e-5 for a, b in zip(*gradients, strict=True) if b.norm() > 1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *BAD_SIZES,
        ({"num_classes": -1}, "num_classes -1 must be a whole number, 0 or more"),
        ({"global_tokens": -1}, "global_tokens -1 must be a whole number, 0 or more"),
        ({"window": [4, 4, 4]}, "has 3 numbers for depth 2"),
        ({"window": -1}, "window -1 must be a whole number, 0 or more"),
        ({"window": (4, 2.5)}, "window 2.5 must be a whole number, 0 or more"),
        ({"vocab_size": 200, "pad_id": 256}, "pad_id 256 is no token of vocab_size 200; 0 to 199 are"),
        ({"eps": -1}, "eps -1 must be a number above 0"),
        ({"chunks": 2.5}, "chunks 2.5 must be a whole number"),
        ({"attn_drop_rate": -0.1}, "attn_drop_rate -0.1 must be a share"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        build(**options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((long(1, 65),), r"tokens are 65 long, .* 1 to 64 \(seq_len\)"),
        ((long(1, 4), torch.ones(1, 5)), r"^attention_mask must be a tensor \(1, 4\) as tokens, got .* \(1, 5\)"),
        ((long(1, 4), [1]), "^attention_mask must be a tensor .* got list"),
        ((long(1, 4), None, torch.ones(4)), r"^global_attention_mask must be a tensor \(1, 4\) .* \(4,\)"),
    ],
)
def test_lengths_and_masks_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        build()(*arguments)


@pytest.mark.parametrize(
    ("classes", "tokens", "targets", "words"),
    [*((0, *bad) for bad in BAD_BATCHES), *((3, *bad) for bad in BAD_CLASSES)],
)
def test_input_that_does_not_fit_is_refused(classes, tokens, targets, words):
    with pytest.raises(ValueError, match=words):
        build(num_classes=classes)(tokens, targets=targets)


def test_a_vocabulary_that_ends_before_the_padding_has_none():
    model = build(vocab_size=100).double()
    want = build(vocab_size=101, pad_id=100).double()  # which has it, but unused
    want.load_state_dict(model.state_dict() | {name: want.state_dict()[name] for name in ("embed.weight", "bias")})
    with torch.no_grad():
        want.embed.weight[:100], want.bias[:100] = model.embed.weight, model.bias
    tokens = torch.randint(100, (2, 30))
    torch.testing.assert_close(model(tokens), want(tokens)[..., :100])
    with pytest.raises(ValueError, match="pad_id None"):
        model.load_huggingface({})
