"""NormAct2d: nn.BatchNorm2d and an activation, to the bit, keeping its input alone."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lean_arch.blocks import NormAct2d
from lean_arch.ops.norm_act.activations import MODULES
from tests.blocks.twins import assert_alike, compare, maps, raise_forward, scattered, step, textbook
from tests.ruler import peak_bytes

ACTS = sorted(set(MODULES.values()))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_the_bits_of_torch(act, training):
    module = next(known for known, name in MODULES.items() if name == act)
    norm = scattered(NormAct2d(7, act, eps=1e-3, momentum=0.3)).train(training)
    plain = nn.Sequential(nn.BatchNorm2d(7, eps=1e-3, momentum=0.3), module()).train(training)
    plain[0].load_state_dict(norm.state_dict())
    for x in (maps(3, 7, 5, 9), maps(2, 7, 4, 4, seed=9)):  # the second from the statistics that the first left
        want = {name.replace("0.", ""): t for name, t in step(plain, x).items()}
        assert_alike(step(norm, x), want)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.0}], ids=str
)
def test_options_of_batch_norm(options, training, layout):
    norm = scattered(NormAct2d(6, "silu", **options)).train(training)
    near = () if layout == torch.contiguous_format else ("grad",)  # slices are contiguous, whatever x is
    for seed in (1, 2, 3):
        compare(norm, maps(4, 6, 7, 5, layout=layout, seed=seed), near=near)


def test_batches_are_counted_once():
    norm = NormAct2d(3, momentum=None)
    for count in (1, 2, 3):
        norm(maps(2, 3, 4, 4))
        assert norm.num_batches_tracked.item() == count
    norm.eval()(maps(2, 3, 4, 4))
    with torch.no_grad():
        norm(maps(2, 3, 4, 4))
    assert norm.num_batches_tracked.item() == 3


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]])
@pytest.mark.parametrize("x_needs_grad", [True, False])
def test_frozen_weights(frozen, x_needs_grad):
    norm = scattered(NormAct2d(6, "hardswish"))
    for name in frozen:
        getattr(norm, name).requires_grad_(False)
    x = maps(4, 6, 7, 5).requires_grad_(x_needs_grad)
    if x_needs_grad or len(frozen) < 2:
        compare(norm, x)
    else:
        assert not norm(x).requires_grad


def test_sixteen_bits():
    """As torch: bfloat16 maps by float32 weights; a whole module in bfloat16."""
    x = maps(4, 6, 7, 5).detach().bfloat16().requires_grad_()
    compare(scattered(NormAct2d(6, "silu")), x)
    compare(scattered(NormAct2d(6, "silu")).bfloat16(), x, near=("grad",), tolerance=5e-3)


def test_whoever_listens_to_the_activation_is_heard():
    norm, heard = scattered(NormAct2d(6, "relu")), []
    norm.act.register_forward_pre_hook(lambda module, inputs: heard.append(inputs[0].detach()))
    with textbook():
        want = step(copy.deepcopy(norm), maps(3, 6, 4, 4))
    assert_alike(step(norm, maps(3, 6, 4, 4)), want)
    assert len(heard) == 2


def test_another_activation_and_another_norm():
    """What has no lean form runs as it is."""
    norm = scattered(NormAct2d(6))
    norm.act = nn.Softplus()
    compare(norm, maps(3, 6, 4, 4))
    x = torch.randn(3, 6, 4, 4)
    assert torch.allclose(torch.vmap(norm.eval())(x[:, None])[:, 0], norm(x), atol=1e-6)


def test_what_does_something_else_runs_as_it_is():
    norm = scattered(NormAct2d(6, "gelu"))
    plain = norm(maps(3, 6, 4, 4))
    raise_forward(norm.act)
    compare(norm, maps(3, 6, 4, 4))
    assert torch.equal(norm(maps(3, 6, 4, 4)), plain + 0.5)


@pytest.mark.parametrize("act", ["identity", "silu"])
def test_its_result_may_be_written_over(act):
    """As by an activation in place behind it."""
    chain = nn.Sequential(scattered(NormAct2d(6, act)), nn.ReLU(inplace=True))
    compare(chain, maps(3, 6, 4, 4))


def test_copies_pickles_and_state_dict():
    norm = scattered(NormAct2d(6, "silu")).train()
    assert set(norm.state_dict()) == set(nn.BatchNorm2d(6).state_dict())
    buffer = io.BytesIO(pickle.dumps(norm))
    want = step(copy.deepcopy(norm), maps(3, 6, 4, 4))
    assert_alike(step(pickle.load(buffer), maps(3, 6, 4, 4)), want)


@pytest.mark.parametrize("training", [True, False])
def test_scripts_exports_and_compiles(training):
    norm, x = scattered(NormAct2d(6, "silu")).train(training), maps(3, 6, 4, 4)
    want = step(copy.deepcopy(norm), x)
    assert_alike(step(torch.jit.script(copy.deepcopy(norm)), x), want, near=("",))
    compiled = copy.deepcopy(norm)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert_alike(step(compiled, x), want, near=("",))
    if not training:
        assert torch.equal(torch.export.export(norm, (x,)).module()(x), want["y"])


def test_memory():
    """A chain of them keeps a map each, where torch's modules keep two, and silu a third."""
    chain = nn.Sequential(*(NormAct2d(8, "silu") for _ in range(6)))
    x = maps(8, 8, 32, 32)
    with textbook():
        plain = peak_bytes(lambda: chain(x).sum().backward())
    assert peak_bytes(lambda: chain(x).sum().backward()) <= 0.7 * plain


@pytest.mark.parametrize("act", ["reluu", None, nn.ReLU])
def test_unknown_act(act):
    with pytest.raises(ValueError, match=r"act .* is unknown; gelu, hardswish, identity, relu, relu6, silu are known"):
        NormAct2d(4, act)


@pytest.mark.parametrize("channels", [0, -1, 1.5, "4"])
def test_no_channels(channels):
    with pytest.raises(ValueError, match=f"channels {channels!r} must be a whole number, 1 or more"):
        NormAct2d(channels)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 5, 3, 3), r"x must be \(B, 4, H, W\), got \(2, 5, 3, 3\)"),
        (torch.randn(4, 3, 3), r"x must be \(B, 4, H, W\), got \(4, 3, 3\)"),
        (torch.ones(2, 4, 3, 3, dtype=torch.int64), "x is torch.int64, but the weights are torch.float32"),
        (torch.randn(2, 4, 3, 3).double(), "x is torch.float64, but the weights are torch.float32"),
        (torch.randn(1, 4, 1, 1), r"cannot train on an input of shape \(1, 4, 1, 1\)"),
    ],
)
def test_bad_input_is_refused_by_name(x, message):
    with pytest.raises(ValueError, match=message):
        NormAct2d(4)(x)
