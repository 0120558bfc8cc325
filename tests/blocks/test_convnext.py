"""ConvNeXtBlock: the textbook block's numbers, keeping nothing that is four times as wide."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from lean_arch.blocks import ConvNeXtBlock
from lean_arch.blocks.norm_act import KEEP
from tests.blocks.twins import assert_alike, compare, maps, raise_forward, relative_error, scattered, step, textbook
from tests.ruler import peak_bytes

BLOCKS = {
    "7x7": functools.partial(ConvNeXtBlock, 6),
    "5x5, narrow": functools.partial(ConvNeXtBlock, 9, kernel_size=5, mlp_ratio=2, layer_scale=0.5),
    "without scale": functools.partial(ConvNeXtBlock, 6, layer_scale=None, mlp_ratio=0.5),
    "dropped": functools.partial(ConvNeXtBlock, 6, drop_path_rate=0.5),
}
LISTENED = "conv_dw", "norm", "mlp", "mlp.fc1", "mlp.act", "mlp.fc2", "shortcut", "drop_path", ""
each_block = pytest.mark.parametrize("name", BLOCKS)
each_keep = pytest.mark.parametrize("keep", KEEP)
alike = functools.partial(compare, near=("grad", "y"), tolerance=5e-6)


def build(name, keep="inputs", **options):
    torch.manual_seed(0)
    return scattered(BLOCKS[name](keep=keep, **options)).train()


def maps_for(block, batch=5, size=(9, 7), **how):
    return maps(batch, block.conv_dw.in_channels, *size, **how)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@each_keep
@each_block
def test_the_textbooks_numbers(name, keep, layout):
    for training in (True, False):
        block = build(name, keep).to(memory_format=layout).train(training)
        alike(block, maps_for(block, layout=layout))
        alike(block, maps_for(block, batch=1, size=(1, 1), layout=layout).detach())


@each_keep
@each_block
def test_in_float64(name, keep):
    block = build(name, keep).double()
    compare(block, maps_for(block).detach().double().requires_grad_(), near=("grad", "y"), tolerance=1e-12)


@pytest.mark.parametrize("frozen", ["conv_dw", "norm", "mlp", "mlp.fc1", "bias", "gamma", ""])
@each_keep
def test_frozen_weights(keep, frozen):
    block = build("7x7", keep)
    for name, p in block.named_parameters():
        p.requires_grad_(frozen not in name)
    alike(block, maps_for(block))
    if frozen:
        alike(block, maps_for(block).detach())


@each_block
def test_autocast_is_as_near_as_the_textbook(name):
    exact = build(name).double()
    x = maps_for(exact, batch=3)
    want = step(exact, x.detach().double().requires_grad_())
    near = {}
    for kind in (*KEEP, "textbook"):
        block = build(name, kind if kind in KEEP else "convs")
        with torch.autocast("cpu", torch.bfloat16), textbook() if kind == "textbook" else torch.enable_grad():
            got = step(block, x)
        near[kind] = sum(relative_error(got[key], w) for key, w in want.items() if "grad" in key)
    assert max(near[kind] for kind in KEEP) <= 1.05 * near["textbook"], near


@each_keep
def test_twice_in_one_graph_and_a_second_backward_pass(keep):
    block = build("7x7", keep)
    first, second = maps_for(block), maps_for(block, batch=3, seed=5)
    inputs = [first, second, *block.parameters()]

    def run():
        loss = block(first).square().sum() + block(second * 0.5).square().sum()
        return [torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2)]

    one, two = run()
    assert all(map(torch.equal, one, two))
    with textbook():
        wanted = run()[0]
    assert max(map(relative_error, one, wanted)) < 5e-6


@each_keep
def test_second_derivative_is_refused(keep):
    block = build("7x7", keep)
    x = maps_for(block)
    (grad,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("part", LISTENED)
def test_whoever_listens_is_heard(part):
    block, heard = build("7x7"), []
    block.get_submodule(part).register_forward_hook(lambda m, x, y: heard.append(y.detach().clone()))
    alike(block, maps_for(block))
    assert len(heard) == 2
    assert relative_error(*heard) < 1e-6


def test_what_has_no_lean_form_runs_as_it_is():
    for change in (
        lambda block: setattr(block.mlp, "act", nn.Softplus()),
        lambda block: setattr(block, "norm", nn.LayerNorm(6, bias=False)),
        lambda block: setattr(block, "norm", nn.RMSNorm(6)),
        lambda block: setattr(block.mlp, "fc1", nn.Linear(6, 24, bias=False)),
        lambda block: setattr(block, "conv_dw", nn.Conv2d(6, 6, 7, padding=3, groups=6, padding_mode="reflect")),
    ):
        block = build("7x7")
        change(block)
        compare(block, maps_for(block))


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("part", ["norm", "mlp", "mlp.fc1", "mlp.act", "mlp.fc2"])
def test_a_part_that_does_something_else_is_heeded(part):
    block = build("7x7")
    plain = block(maps_for(block))
    raise_forward(block.get_submodule(part))
    alike(block, maps_for(block))
    assert relative_error(block(maps_for(block)), plain) > 1e-3


def test_a_norm_of_another_class_is_heeded():
    block = build("7x7")
    plain = block(maps_for(block))
    block.norm = Doubled(6)
    alike(block, maps_for(block))
    assert relative_error(block(maps_for(block)), plain) > 1e-3


@each_keep
def test_autocast_leaves_float64_alone(keep):
    block = build("7x7", keep).double()
    x = maps_for(block).detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = step(copy.deepcopy(block), x)
    assert_alike(got, step(block, x))


@each_keep
def test_copies_pickles_and_state_dict(keep):
    block = build("dropped", keep)
    x = maps_for(block)
    block(x).sum()
    want = step(copy.deepcopy(block), x)
    assert_alike(step(pickle.loads(pickle.dumps(block)), x), want)
    tensors = block.state_dict()
    assert len({t.data_ptr() for t in tensors.values()}) == len(tensors) == len(list(block.parameters()))
    with torch.inference_mode():
        torch.manual_seed(2)
        y = block(x)
    assert relative_error(y, want["y"]) < 1e-6


def test_compiles_exports_and_scripts():
    block = build("7x7")
    x = maps_for(block)
    compiled = copy.deepcopy(block)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for other in (compiled, torch.jit.script(copy.deepcopy(block))):
        assert_alike(step(other, x), step(block, x), near=("grad", "y"), tolerance=1e-5)
    exported = torch.export.export(block.eval(), (x.detach(),)).module()(x.detach())
    assert relative_error(exported, block(x)) < 1e-6


def test_each_way_to_keep_is_below_the_textbook():
    x = maps(4, 16, 48, 48)
    kept, peaks = [], []
    for keep in (None, "convs", "inputs"):
        blocks = nn.Sequential(*(ConvNeXtBlock(16, keep=keep or "convs") for _ in range(4)))
        held = {}
        with textbook() if keep is None else torch.enable_grad():
            with torch.autograd.graph.saved_tensors_hooks(lambda t: held.update({t.data_ptr(): t}) or t, lambda t: t):  # noqa: B023
                blocks[0](x)
            kept.append(sum(t.nbytes for t in held.values()) / x.nbytes)
            peaks.append(peak_bytes(lambda: blocks(x).sum().backward()))  # noqa: B023
    for most, share, mine, peak in zip((6.3, 2.3), (0.62, 0.36), kept[1:], peaks[1:]):
        assert mine <= most, kept
        assert peak <= share * peaks[0], [p / peaks[0] for p in peaks]
    assert kept[0] > 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": "all"}, "keep 'all' is unknown; convs, dear, inputs are known"),
        ({"kernel_size": 4}, "kernel_size must be odd, got 4"),
        ({"channels": 0}, "^channels 0 must be a whole number, 1 or more"),
        ({"mlp_ratio": 0}, "mlp_ratio 0 must give a whole number of channels, 1 or more, of 5"),
        ({"mlp_ratio": 1.5}, "mlp_ratio 1.5 must give"),
        ({"mlp_ratio": "4"}, "mlp_ratio '4' must give"),
        ({"mlp_ratio": float("inf")}, "mlp_ratio inf must give"),
        ({"drop_path_rate": -0.1}, "drop_path_rate -0.1 must be a share"),
    ],
)
def test_bad_sizes_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        ConvNeXtBlock(**{"channels": 5} | change)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 5, 3, 3), r"x must be \(B, 4, H, W\), got \(2, 5, 3, 3\)"),
        (torch.randn(4, 3, 3), r"x must be \(B, 4, H, W\), got \(4, 3, 3\)"),
        (torch.ones(2, 4, 3, 3, dtype=torch.int64), "x is torch.int64, but the weights are torch.float32"),
        (torch.randn(2, 4, 3, 3).double(), "x is torch.float64, but the weights are torch.float32"),
    ],
)
def test_bad_input_is_refused_by_name(x, message, gradients):
    with pytest.raises(ValueError, match=message), torch.set_grad_enabled(gradients):
        ConvNeXtBlock(4)(x)
