"""Depthwise-separable blocks: their textbook form to the bit, whatever they keep, in a part of its memory."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lean_arch.blocks import InvertedResidual, SeparableConv2d, UniversalInvertedResidual
from lean_arch.ops.norm_act import reference
from tests.blocks.separables import BLOCKS, KEEP, NEAR, VARIED, build, each_block, each_keep, maps_for, norms_of
from tests.blocks.twins import assert_alike, compare, maps, relative_error, scattered, step, textbook
from tests.ruler import peak_bytes


def freeze(*names):
    def change(block):
        for name, p in block.named_parameters():
            p.requires_grad_(not any(part in name for part in names))

    return change


def averaging(block):
    for norm in norms_of(block):
        norm.momentum = None


def untracked(block):
    for norm in norms_of(block):
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None


def plain_norms(block):
    for norm in norms_of(block):
        norm.weight = norm.bias = None


def frozen_norms(block):
    for norm in norms_of(block):
        norm.eval()


def one_frozen_norm(block):
    norms_of(block)[0].eval().requires_grad_(False)


CHANGES = {
    "as it is": lambda block: None,
    "eval": nn.Module.eval,
    "momentum None": averaging,
    "no running statistics": untracked,
    "no running statistics, eval": lambda block: (untracked(block), block.eval()),
    "norms without weights": plain_norms,
    "frozen norms": frozen_norms,
    "one frozen norm": one_frozen_norm,
    "frozen norms and their weights": lambda block: (frozen_norms(block), freeze("bn")(block)),
    "frozen convolutions": freeze("conv"),
    "frozen start": freeze("conv_pw.", "bn1"),
    "frozen end": freeze("conv_pwl", "bn3", "conv_pw.", "bn2"),
    "frozen middle": freeze("conv_dw", "se", "bn2"),
    "all frozen": freeze(""),
}


@each_keep
@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name in BLOCKS for change in CHANGES if change in ("as it is", "eval") or name in VARIED],
)
def test_the_textbooks_bits(name, change, keep):
    block = build(name, keep)
    CHANGES[change](block)
    for seed in (1, 2):  # the second from the statistics that the first left
        compare(block, maps_for(block, seed=seed), near=NEAR)
    if change != "all frozen":
        compare(block, maps_for(block).detach(), near=NEAR)


@each_keep
@each_block
def test_channels_last(name, keep):
    block = build(name, keep).to(memory_format=torch.channels_last)
    x = maps_for(block, layout=torch.channels_last)
    assert block(x).is_contiguous(memory_format=torch.channels_last)
    compare(block, x, near=("grad", "y", "running"), tolerance=1e-5, floor=9.0)  # a bias before a norm: nought


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_shape(data):
    """Norms make gradients of nought where a filter has but one tap to see: there is a floor."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    some = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    options = {
        "kernel_size": some(1, 3, 5),
        "stride": number(1, 3),
        "dilation": number(1, 2),
        "act": some("relu", "relu6", "silu", "gelu", "hardswish", "identity"),
        "skip": some(True, False),
        "se_channels": some(None, 1, 4),
        "drop_path_rate": some(0.0, 0.3),
        "keep": some(*KEEP),
    }
    sizes = number(1, 9), number(1, 9)
    if some(0, 1, 2):
        options["expansion"] = number(1, 4)
        kind = some(InvertedResidual, UniversalInvertedResidual)
    else:
        kind = SeparableConv2d
    if kind is UniversalInvertedResidual:
        del options["dilation"]
        options |= {"start_kernel_size": some(0, 3), "end_kernel_size": some(0, 1, 5)}
    block = kind(*sizes, **options)
    compare(scattered(block), maps_for(block, number(2, 5), (number(1, 11), number(1, 11))), near=NEAR, floor=100.0)


@each_keep
def test_against_the_papers(keep):
    """MobileNetV2's block by the formulas, in float64."""
    block = build("inverted", keep).double()
    x = maps_for(block).detach().double().requires_grad_()
    wanted = dict(block.named_parameters())

    def normalised(z, norm, act):
        return reference.batch_norm_act(z, wanted[f"{norm}.weight"], wanted[f"{norm}.bias"], 1e-5, act)

    y = normalised(F.conv2d(x, wanted["conv_pw.weight"]), "bn1", "silu")
    y = normalised(F.conv2d(y, wanted["conv_dw.weight"], padding=2, groups=18), "bn2", "silu")
    y = normalised(F.conv2d(y, wanted["conv_pwl.weight"]), "bn3", "identity") + x
    upstream = torch.randn_like(y)
    grads = [torch.autograd.grad(result, [x, *block.parameters()], upstream) for result in (block(x), y)]
    for got, want in zip(*grads):
        assert relative_error(got, want) < 1e-11


@each_block
def test_autocast_is_as_near_as_the_textbook(name):
    near = {}
    exact = build(name).double()
    x = maps_for(exact, batch=3)
    want = step(exact, x.detach().double().requires_grad_())
    for kind in (*KEEP, "textbook"):
        block = build(name, kind if kind in KEEP else "convs")
        with torch.autocast("cpu", torch.bfloat16), textbook() if kind == "textbook" else torch.enable_grad():
            got = step(block, x)
        assert got["y"].dtype == (x.dtype if block.has_skip else torch.bfloat16)
        near[kind] = sum(relative_error(got[key], w) for key, w in want.items() if "grad" in key and w.norm() > 1e-3)
    assert max(near[kind] for kind in KEEP) <= 1.1 * near["textbook"], near


@each_keep
@each_block
def test_a_second_backward_pass_gives_the_same(name, keep):
    block = build(name, keep)
    x = maps_for(block)
    loss = block(x).square().sum()
    inputs = [x, *block.parameters()]
    one, two = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, one, two))
    some = [0, 2, len(inputs) - 1]
    assert all(map(torch.equal, torch.autograd.grad(loss, [inputs[i] for i in some]), [one[i] for i in some]))


@each_keep
def test_second_derivative_is_refused(keep):
    block = build("inverted, excited", keep)
    x = maps_for(block)
    (grad,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@each_keep
@each_block
def test_twice_in_one_graph_and_interleaved(name, keep):
    block = build(name, keep)
    first, second = maps_for(block), maps_for(block, batch=3, seed=5)
    twin = copy.deepcopy(block)

    def run(block):
        torch.manual_seed(4)
        y1, y2 = block(first), block(second)
        y3 = block(first * 0.5)
        inputs = [first, second, *block.parameters()]
        grads = torch.autograd.grad(y3.square().sum(), [first, *inputs[2:]])
        grads += torch.autograd.grad(y1.square().sum() + y2.square().sum(), inputs)
        return dict(enumerate(grads)) | dict(block.named_buffers())

    with textbook():
        want = run(twin)
    depthwise = {m.weight.shape for m in block.modules() if isinstance(m, nn.Conv2d) and m.groups > 1}
    near = [i for i, g in enumerate(want.values()) if g.shape in depthwise]
    got = run(block)
    for key, w in want.items():
        assert relative_error(got[key], w) < 2e-6 if key in near else torch.equal(got[key], w), key


@each_keep
@each_block
def test_without_gradients_the_same_numbers(name, keep):
    block = build(name, keep)
    x = maps_for(block)
    torch.manual_seed(1)
    want = copy.deepcopy(block)(x)
    for off in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(1)
        with off():
            y = copy.deepcopy(block)(x)
        assert torch.equal(y, want)
        assert not y.requires_grad


@each_keep
@each_block
def test_copies_pickles_and_state_dict(name, keep):
    block = build(name, keep)
    x = maps_for(block)
    block(x).sum()  # a graph has been there
    want = step(copy.deepcopy(block), x)
    assert_alike(step(pickle.load(io.BytesIO(pickle.dumps(block))), x), want)
    tensors = block.state_dict()
    assert (
        len({t.data_ptr() for t in tensors.values()})
        == len(tensors)
        == len(set(map(id, block.parameters()))) + 3 * len(norms_of(block))
    )
    other = BLOCKS[name](keep="convs")
    other.load_state_dict(tensors)
    assert_alike(step(other, x), step(copy.deepcopy(block), x), near=NEAR)


def kept_bytes(run):
    held = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.update({t.data_ptr(): t}) or t, lambda t: t):
        run()
    return sum(t.nbytes for t in held.values())


@pytest.mark.parametrize(("keep", "share"), [*zip(KEEP, (0.55, 0.61, 0.61))])
def test_peak_of_a_block(keep, share):
    """One alone computes again all that the others keep, so it gains nothing beyond "convs"."""
    block = InvertedResidual(16, 16, kernel_size=5, expansion=4, act="silu", keep=keep)
    x = maps(8, 16, 56, 56)
    lean = peak_bytes(lambda: block(x).backward(x.detach()))
    with textbook():
        assert lean <= share * peak_bytes(lambda: block(x).backward(x.detach()))


def test_each_way_to_keep_is_below_the_one_before():
    """Kept by a block, and the peak of a few: the 1x1 convolution is cheap, the 7x7 one dear."""
    x = maps(6, 16, 48, 48)
    kept, peaks = [], []
    for keep in (None, *KEEP):
        blocks = [
            InvertedResidual(16, 16, kernel_size=7, expansion=4, act="silu", keep=keep or "convs") for _ in range(4)
        ]
        with textbook() if keep is None else torch.enable_grad():
            kept.append(kept_bytes(lambda: blocks[0](x)) / x.nbytes)  # noqa: B023
            peaks.append(peak_bytes(lambda: nn.Sequential(*blocks)(x).sum().backward()))  # noqa: B023
    for most, share, mine, peak in zip((10.2, 6.2, 2.2), (0.47, 0.35, 0.27), kept[1:], peaks[1:]):
        assert mine <= most, kept
        assert peak <= share * peaks[0], [p / peaks[0] for p in peaks]
    assert kept[0] > 20
