"""LayerNorm2d, alone and in a pair with a convolution: the textbook's numbers from the input alone."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from lean_arch.blocks import ConvNorm2d, LayerNorm2d, NormConv2d
from tests.blocks.twins import assert_alike, compare, maps, relative_error, scattered, step, textbook
from tests.ruler import peak_bytes

BLOCKS = {
    "norm": lambda: LayerNorm2d(6),
    "norm without weights": lambda: LayerNorm2d(6, 1e-3, affine=False),
    "norm without bias": lambda: LayerNorm2d(6, bias=False),
    "norm, conv": lambda: NormConv2d(LayerNorm2d(6), nn.Conv2d(6, 9, 2, 2)),
    "norm, depthwise conv": lambda: NormConv2d(LayerNorm2d(6), nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)),
    "conv, norm": lambda: ConvNorm2d(nn.Conv2d(6, 8, 4, 4), LayerNorm2d(8)),
}
each_block = pytest.mark.parametrize("name", BLOCKS)
alike = functools.partial(compare, near=("grad",), tolerance=5e-6)


def build(name):
    torch.manual_seed(0)
    return scattered(BLOCKS[name]())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@each_block
def test_the_textbooks_numbers(name, layout):
    block = build(name).to(memory_format=layout)
    alike(block, maps(5, 6, 9, 7, layout=layout))
    alike(block, maps(1, 6, 4, 4, layout=layout).detach() if list(block.parameters()) else maps(1, 6, 4, 4))
    compare(block.double(), maps(3, 6, 8, 8).detach().double().requires_grad_(), near=("grad", "y"), tolerance=1e-12)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "1.weight", "1.bias", "0", "1"])
@pytest.mark.parametrize("name", ["norm, conv", "conv, norm"])
def test_frozen_weights(name, frozen):
    block = build(name)
    for key, p in block.named_parameters():
        p.requires_grad_(not key.startswith(frozen))
    alike(block, maps(5, 6, 9, 8))
    alike(block, maps(5, 6, 9, 8).detach())


@each_block
def test_autocast_is_as_near_as_the_textbook(name):
    exact = build(name).double()
    x = maps(5, 6, 9, 8)
    want = step(exact, x.detach().double().requires_grad_())
    errors = []
    for near in (torch.enable_grad, textbook):
        with torch.autocast("cpu", torch.bfloat16), near():
            got = step(build(name), x)
        errors.append(sum(relative_error(got[key], w) for key, w in want.items() if key != "random stream"))
    assert errors[0] <= 1.05 * errors[1] + 1e-6, errors


@pytest.mark.parametrize("part", ["", "0", "1"])
@pytest.mark.parametrize("name", ["norm, conv", "conv, norm"])
def test_whoever_listens_is_heard(name, part):
    block, heard = build(name), []
    block.get_submodule(part).register_forward_hook(lambda m, x, y: heard.append(y.detach().clone()))
    alike(block, maps(5, 6, 9, 8))
    assert len(heard) == 2
    assert torch.equal(*heard)


def test_what_has_no_lean_form_runs_as_it_is():
    for name, number, part in (
        ("norm, conv", 0, nn.GroupNorm(2, 6)),
        ("norm, conv", 0, nn.LayerNorm(8)),
        ("norm, conv", 1, nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect")),
        ("conv, norm", 1, nn.BatchNorm2d(8)),
        ("conv, norm", 0, nn.Conv2d(6, 8, 3, padding="same")),
    ):
        block = build(name)
        block[number] = part
        alike(block, maps(3, 6, 8, 8))
    alike(build("norm, conv").append(nn.GELU()), maps(3, 6, 8, 8))
    alike(build("norm, conv")[:1], maps(3, 6, 8, 8))


@each_block
def test_copies_pickles_scripts_exports_and_compiles(name):
    block, x = build(name), maps(3, 6, 8, 8)
    block(x).sum()
    want = step(copy.deepcopy(block), x)
    assert_alike(step(pickle.loads(pickle.dumps(block)), x), want)
    compiled = copy.deepcopy(block)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for other in (compiled, torch.jit.script(copy.deepcopy(block))):
        assert_alike(step(other, x), want, near=("grad", "y"), tolerance=1e-5)
    assert relative_error(torch.export.export(block, (x.detach(),)).module()(x.detach()), want["y"]) < 1e-6
    assert relative_error(torch.fx.symbolic_trace(block)(x), want["y"]) < 1e-6


def test_a_norm_that_does_something_else_runs_as_it_is():
    class Doubled(LayerNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    torch.manual_seed(0)
    for pair in (NormConv2d(Doubled(6), nn.Conv2d(6, 8, 2)), ConvNorm2d(nn.Conv2d(6, 8, 2), Doubled(8))):
        alike(pair, maps(3, 6, 8, 8))


@each_block
def test_its_result_may_be_written_over(name):
    """As by an activation in place behind it."""
    alike(nn.Sequential(build(name), nn.ReLU(inplace=True)), maps(3, 6, 8, 8))


@each_block
def test_autocast_leaves_float64_alone(name):
    block, x = build(name).double(), maps(3, 6, 8, 8).detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = step(copy.deepcopy(block), x)
    assert_alike(got, step(block, x))


def kept_bytes(block, x):
    held = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.update({t.data_ptr(): t}) or t, lambda t: t):
        block(x)
    parameters = {p.data_ptr() for p in block.parameters()}
    return sum(t.nbytes for key, t in held.items() if key not in parameters)


@pytest.mark.parametrize("name", ["norm, conv", "conv, norm"])
def test_the_input_is_all_that_is_kept(name):
    x = maps(8, 6, 32, 32)
    block = build(name)
    with textbook():
        plain = kept_bytes(block, x)
    assert kept_bytes(block, x) == x.nbytes < 0.95 * plain
    if name == "conv, norm":
        block.keep = "convs"
        result = block[0](x).nbytes
        assert kept_bytes(block, x) == x.nbytes + result


def test_no_whole_copies():
    """Of contiguous maps, which F.layer_norm copies whole, forward and again backward."""
    norm, x = LayerNorm2d(16), maps(256, 16, 32, 32)
    step = lambda: torch.autograd.grad(norm(x).sum(), x)  # noqa: E731
    with textbook():
        plain = peak_bytes(step)
    assert peak_bytes(step) <= 0.6 * plain


@pytest.mark.parametrize("channels", [0, -1, 1.5, "4"])
def test_no_channels(channels):
    with pytest.raises(ValueError, match=f"channels {channels!r} must be a whole number, 1 or more"):
        LayerNorm2d(channels)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 5, 4, 4), r"x must be \(B, 6, H, W\), got \(2, 5, 4, 4\)"),
        (torch.randn(6, 4, 4), r"x must be \(B, 6, H, W\), got \(6, 4, 4\)"),
        (torch.ones(2, 6, 4, 4, dtype=torch.int64), "x is torch.int64, but the weights are torch.float32"),
        (torch.randn(2, 6, 4, 4).double(), "x is torch.float64, but the weights are torch.float32"),
    ],
)
@pytest.mark.parametrize("name", ["norm", "norm, conv", "conv, norm"])
def test_bad_input_is_refused_by_name(name, x, message):
    with pytest.raises(ValueError, match=message):
        build(name)(x)


def test_a_norm_that_does_not_fit_its_convolution_is_refused_by_name():
    with pytest.raises(ValueError, match=r"weight must be a tensor \(8,\), one number a channel of x, got \(6,\)"):
        ConvNorm2d(nn.Conv2d(6, 8, 2), LayerNorm2d(6))(maps(2, 6, 4, 4))
