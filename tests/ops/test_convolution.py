"""Convolutions with an im2col backward: same forward bits, gradients against float64, and no scratch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lean_arch.ops import convolution
from lean_arch.ops.convolution import Im2colConv2d, small_map_convolutions
from tests.ruler import peak_bytes

GEOMETRIES = [
    {"kernel": 3, "stride": 1, "padding": 1, "dilation": 1},
    {"kernel": 3, "stride": 2, "padding": 1, "dilation": 1},
    {"kernel": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)},
    {"kernel": 1, "stride": 2, "padding": 0, "dilation": 1},
    {"kernel": 5, "stride": 1, "padding": 0, "dilation": 1},
]


@pytest.fixture(autouse=True)
def worth_any_bias(monkeypatch):
    monkeypatch.setattr(convolution, "WORTH_A_BIAS", 1)


def operands(kernel, bias=True, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kh, kw = (kernel, kernel) if isinstance(kernel, int) else kernel
    x = torch.randn(2, 6, size, size, generator=generator, requires_grad=True)
    weight = torch.randn(128, 6, kh, kw, generator=generator, requires_grad=True)
    return x, weight, torch.randn(128, generator=generator, requires_grad=True) if bias else None


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def routed(out):
    return out.grad_fn.name() == "Im2colConv2dBackward"


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_match_float64(geometry, bias, channels_last):
    options = {k: v for k, v in geometry.items() if k != "kernel"}
    leaves = operands(geometry["kernel"], bias)
    x = leaves[0].contiguous(memory_format=torch.channels_last) if channels_last else leaves[0]
    with small_map_convolutions():
        out = F.conv2d(x, *leaves[1:], **options)
    assert routed(out)
    assert torch.equal(out, F.conv2d(x, *leaves[1:], **options))
    (grad_x,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    (plain_x,) = torch.autograd.grad(F.conv2d(x, *leaves[1:], **options).square().sum(), x)
    assert torch.equal(grad_x, plain_x)
    wide = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    want_out = F.conv2d(*wide, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    given = [leaf for leaf in leaves if leaf is not None]
    got = torch.autograd.grad(out, given, upstream)
    want = torch.autograd.grad(want_out, [leaf for leaf in wide if leaf is not None], upstream.double())
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-6


def test_frozen_sides_get_no_gradient():
    x, weight, bias = operands(3)
    with small_map_convolutions():
        out = F.conv2d(x.detach(), weight, bias.detach(), padding=1)
        assert routed(out)
        (got,) = torch.autograd.grad(out.square().sum(), weight)
        assert not routed(F.conv2d(x, weight.detach(), bias, padding=1))
    want_out = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    (want,) = torch.autograd.grad(want_out.square().sum(), weight)
    assert relative(got, want) < 1e-6


def test_the_gradient_can_be_differentiated_again():
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, 4, 4), (3, 2, 3, 2), (3,)
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)

    def convolve(*leaves):
        return Im2colConv2d.apply(*leaves, (2, 1), (1, 1), (1, 2))

    assert torch.autograd.gradcheck(convolve, (x, weight, bias))
    assert torch.autograd.gradgradcheck(convolve, (x, weight, bias))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(x, w[:, :3], groups=2),
        lambda x, w: F.conv2d(x, w, padding="same"),
        lambda x, w: F.conv2d(x[0], w),
        lambda x, w: F.conv2d(x.double(), w.double()),
        lambda x, w: F.conv2d(F.pad(x, (20, 20, 20, 20)), w),
    ],
    ids=["groups", "same", "unbatched", "float64", "large map"],
)
def test_other_convolutions_are_left_alone(call):
    x, weight, _ = operands(3)
    with small_map_convolutions():
        assert not routed(call(x, weight))


def test_a_small_weight_with_a_bias_is_left_alone(monkeypatch):
    x, weight, bias = operands(3)
    monkeypatch.setattr(convolution, "WORTH_A_BIAS", weight.numel() + 1)
    with small_map_convolutions():
        assert not routed(F.conv2d(x, weight, bias))
        assert routed(F.conv2d(x, weight))


def test_autocast_is_left_to_pytorch():
    x, weight, bias = operands(3)
    with torch.autocast("cpu", dtype=torch.bfloat16), small_map_convolutions():
        out = F.conv2d(x, weight, bias)
        assert out.dtype == torch.bfloat16
        assert not routed(out)


def test_modules_go_through_it_and_onednn_is_on_again():
    layer = nn.Conv2d(6, 128, 3)
    with small_map_convolutions():
        out = layer(operands(3)[0])
    assert routed(out)
    out.sum().backward()
    assert torch.backends.mkldnn.enabled


def test_no_scratch_of_the_size_of_the_weight():
    layer = nn.Conv2d(128, 256, 7)
    x = torch.randn(2, 128, 7, 7, generator=torch.Generator().manual_seed(0))

    def step(context):
        with context:
            out = layer(x)
        out.sum().backward()

    weight = layer.weight.numel() * 4
    assert peak_bytes(lambda: step(small_map_convolutions())) < 1.2 * weight
    assert peak_bytes(lambda: step(torch.enable_grad())) > 1.5 * weight  # when this fails, the detour is not needed
