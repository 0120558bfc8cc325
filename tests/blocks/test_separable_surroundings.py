"""Depthwise-separable blocks amid hooks, SyncBatchNorm, compilers, checkpointing and processes; and wrong input."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from torch import nn

from lean_arch.blocks import (
    InvertedResidual,
    LayerNorm2d,
    NormAct2d,
    ReversibleSequence,
    SeparableConv2d,
    UniversalInvertedResidual,
)
from tests.blocks.separables import NEAR, build, each_block, each_keep, maps_for, norms_of
from tests.blocks.twins import assert_alike, compare, maps, raise_forward, relative_error, step, textbook
from tests.ruler import allocations

LISTENERS = {
    "forward": lambda part, heard: part.register_forward_hook(lambda m, x, y: heard.append(y.detach().clone())),
    "before": lambda part, heard: part.register_forward_pre_hook(lambda m, x: heard.append(x[0].detach().clone())),
    "backward": lambda part, heard: part.register_full_backward_hook(lambda m, x, y: heard.append(y[0].clone())),
}


@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("part", ["conv_pw", "bn1", "bn1.act", "conv_dw", "se", "se.act1", "conv_pwl", "bn3", ""])
def test_whoever_listens_is_heard(part, kind):
    """The block takes the textbook path, with the textbook's values."""
    if part == "bn1.act" and kind == "backward":
        pytest.skip("PyTorch's hook refuses an activation in place")
    heard, results = ([], []), []
    for block, ears in zip([build("inverted, excited") for _ in range(2)], heard):
        LISTENERS[kind](block.get_submodule(part), ears)
        with textbook() if ears is heard[1] else torch.enable_grad():
            results.append(step(block, maps_for(block)))
    assert_alike(*results, near=NEAR)
    assert len(heard[0]) == len(heard[1]) == 1
    assert torch.equal(heard[0][0], heard[1][0])


class Tripled(nn.BatchNorm2d):
    def forward(self, x):
        return 3 * super().forward(x)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    "norm",
    [nn.Identity(), Tripled(12), LayerNorm2d(12), nn.GroupNorm(2, 12), nn.BatchNorm2d(12, affine=False)],
    ids=lambda norm: type(norm).__name__,
)
def test_another_norm(norm, number):
    """None, as where it has become part of the convolution; a BatchNorm with a forward of its own; no BatchNorm."""
    block = InvertedResidual(6, 12, expansion=2, act="silu").train()
    setattr(block, f"bn{number}", copy.deepcopy(norm))
    compare(block, maps_for(block), near=("y", "grad"), tolerance=5e-6, floor=10)


@pytest.mark.parametrize("part", ["conv_pw", "bn1", "bn1.act", "conv_dw", "se", "se.conv_reduce", "bn3"])
def test_a_part_that_does_something_else_is_heeded(part):
    block = build("inverted, excited").eval()
    plain = block(maps_for(block))
    raise_forward(block.get_submodule(part))
    compare(block, maps_for(block), near=NEAR)
    assert relative_error(block(maps_for(block)), plain) > 1e-3


@pytest.mark.parametrize("name", ["inverted, halved", "universal, halved", "universal, at the end"])
def test_its_result_may_be_written_over(name):
    """As by an activation in place behind it."""
    chain = nn.Sequential(build(name), nn.ReLU(inplace=True))
    compare(chain, maps_for(chain), near=NEAR)


@pytest.mark.parametrize("name", ["inverted, excited", "separable, linear", "universal"])
def test_autocast_leaves_float64_alone(name):
    block = build(name).double()
    x = maps_for(block).detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = step(copy.deepcopy(block), x)
    assert_alike(got, step(block, x))


@each_block
def test_sync_batch_norm(name):
    """Converted, the activations are still there; without processes it runs in eval."""
    block = build(name)
    block(maps_for(block))
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(block)).eval()
    assert not norms_of(synced)
    assert synced.state_dict().keys() == block.state_dict().keys()
    x = maps_for(block)
    want = step(block.eval(), x)
    for converted in (synced, copy.deepcopy(synced), pickle.loads(pickle.dumps(synced))):
        assert_alike(step(converted, x), want, near=NEAR)


@pytest.mark.parametrize("name", ["inverted, excited", "separable, linear", "universal"])
def test_compiles_and_exports(name):
    block = build(name, drop_path_rate=0.0)
    x = maps_for(block)
    compiled = copy.deepcopy(block)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert_alike(step(compiled, x), step(block, x), near=("",), tolerance=1e-5)
    block.eval()
    assert torch.equal(torch.export.export(block, (x.detach(),)).module()(x.detach()), block(x))


@pytest.mark.parametrize("name", ["inverted, excited", "universal"])
def test_scripts(name):
    block = build(name)
    assert_alike(
        step(torch.jit.script(copy.deepcopy(block)), maps_for(block)), step(block, maps_for(block)), near=("",)
    )


@each_keep
def test_in_a_reversible_stack(keep):
    """Under autocast the replay rounds as the forward pass did, which ran without gradients."""
    torch.manual_seed(0)
    stack = ReversibleSequence(
        [[InvertedResidual(6, 6, skip=False, expansion=2, keep=keep) for _ in range(2)] for _ in range(3)]
    )
    stored = copy.deepcopy(stack)
    stored.reversible = False
    results = []
    for each in (stack, stored):
        x = maps(4, 6, 9, 7)
        with torch.autocast("cpu", torch.bfloat16):
            y = sum(each((x, x)))
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, *each.parameters()))])
    assert all(map(torch.equal, *results))


@each_keep
def test_checkpointed(keep):
    block = build("inverted, dropped", keep)
    checkpointed = copy.deepcopy(block)
    forward = checkpointed.forward
    checkpointed.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    got, want = step(checkpointed, maps_for(block)), step(block, maps_for(block))
    assert_alike(*({k: t for k, t in d.items() if "grad" in k or k == "y"} for d in (got, want)))


@each_keep
def test_checkpointed_blocks_keep_nothing(keep):
    """Of two blocks checkpointed as one, not even what the first hands to the second."""
    blocks = nn.Sequential(*(InvertedResidual(8, 8, expansion=4, keep=keep) for _ in range(2)))
    x, results = maps(4, 8, 32, 32), []
    run = functools.partial(torch.utils.checkpoint.checkpoint, blocks, use_reentrant=False)
    assert sum(allocations(lambda: results.append(run(x)))) <= 1.2 * x.nbytes


@each_keep
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["conv_pw.weight", "bn1.weight", "bn1.running_mean", "conv_dw.weight", "bn2.bias"])
def test_what_was_written_over_is_refused(name, frozen, keep):
    """Where it is needed again: between the passes, of a block that is frozen up to there or not."""
    block = build("inverted", keep).eval()
    x = maps_for(block).requires_grad_(not frozen)
    if frozen:
        block.requires_grad_(False).conv_pwl.requires_grad_(True)
    want = torch.autograd.grad(block(x).square().sum(), block.conv_pwl.weight)[0]
    loss = block(x).square().sum()
    with torch.no_grad():
        block.get_parameter(name).mul_(1.5) if "running" not in name else block.get_buffer(name).mul_(1.5)
    try:
        (got,) = torch.autograd.grad(loss, block.conv_pwl.weight)
    except RuntimeError as refusal:
        assert "modified by an inplace operation" in str(refusal)  # noqa: PT017
    else:
        assert torch.equal(got, want)
        assert keep == "convs"
        assert name != "bn2.bias"


def test_data_parallel(tmp_path):
    """One process of it: gradients as without, and hooks of its own."""
    import torch.distributed as dist

    block = build("inverted, excited")
    want = step(copy.deepcopy(block), maps_for(block))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        got = step(nn.parallel.DistributedDataParallel(block), maps_for(block))
    finally:
        dist.destroy_process_group()
    assert_alike({name.replace("module.", ""): t for name, t in got.items()}, want)


def test_without_data():
    block = build("inverted, excited").to("meta")
    y = block(torch.empty(2, 6, 5, 4, device="meta"))
    y.sum().backward()
    assert y.shape == (2, 6, 5, 4)
    assert block.conv_dw.weight.grad.is_meta


def test_a_batch_of_none():
    assert build("inverted")(torch.randn(0, 6, 5, 4)).shape == (0, 6, 5, 4)


@pytest.mark.parametrize("wanted", ["conv_pwl.weight", "bn2.weight", "conv_pw.weight"])
@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_computed_again_outlives_the_backward_pass(wanted, frozen, monkeypatch):
    """Not even where the rest of the block asks for no gradients."""
    from lean_arch.blocks import norm_act

    sources = []

    class Watched(norm_act.Source):
        def __init__(self, *parts):
            super().__init__(*parts)
            sources.append(self)

    monkeypatch.setattr(norm_act, "Source", Watched)
    block = build("inverted, excited", "inputs")
    x = maps_for(block).requires_grad_(not frozen)
    parameter = dict(block.named_parameters())[wanted]
    if frozen:
        block.requires_grad_(False)
        parameter.requires_grad_(True)
    y = block(x)
    torch.autograd.grad(y.sum(), parameter, retain_graph=True)
    assert len(sources) == 2
    assert [source.memo for source in sources] == [[], []]


@pytest.mark.parametrize("block", [InvertedResidual, SeparableConv2d, UniversalInvertedResidual])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act": "swish"}, "act 'swish' is unknown; gelu, hardswish"),
        ({"keep": "all"}, "keep 'all' is unknown; convs, dear, inputs are known"),
        ({"kernel_size": 4}, "kernel_size must be odd, got 4"),
        ({"in_channels": 0}, "in_channels 0 must be a whole number, 1 or more"),
        ({"out_channels": 2.0}, "out_channels 2.0 must be a whole number"),
        ({"stride": 0}, "stride 0 must be"),
        ({"dilation": None}, "dilation None must be"),
        ({"se_channels": 0}, "se_channels 0 must be"),
        ({"drop_path_rate": 1.0}, "drop_path_rate 1.0 must be a share"),
        ({"expansion": 1.5}, "expansion 1.5 must give a whole number of channels, 1 or more, of 5"),
        ({"expansion": float("nan")}, "expansion nan must give"),
        ({"expansion": "6"}, "expansion '6' must give"),
        ({"expansion": 0}, "expansion 0 must give"),
        ({"start_kernel_size": 2}, "start_kernel_size must be odd, got 2"),
        ({"end_kernel_size": 1.0}, "end_kernel_size 1.0 must be a whole number"),
        ({"kernel_size": 0, "stride": 2}, "stride 2 needs a depthwise convolution, but all three kernel sizes are 0"),
    ],
)
def test_bad_sizes_are_refused_by_name(block, change, message):
    options = {"in_channels": 5, "out_channels": 5} | change
    unknown = set(options) - set(inspect.signature(block).parameters)
    if unknown or (block is not UniversalInvertedResidual and options.get("kernel_size") == 0):
        return
    with pytest.raises(ValueError, match=message):
        block(**options)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("block", [InvertedResidual(4, 4), SeparableConv2d(4, 6), UniversalInvertedResidual(4, 4)])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 5, 3, 3), r"x must be \(B, 4, H, W\), got \(2, 5, 3, 3\)"),
        (torch.randn(4, 3, 3), r"x must be \(B, 4, H, W\), got \(4, 3, 3\)"),
        (torch.ones(2, 4, 3, 3, dtype=torch.int64), "x is torch.int64, but the weights are torch.float32"),
        (torch.randn(2, 4, 3, 3).double(), "x is torch.float64, but the weights are torch.float32"),
        (torch.randn(2, 4, 3, 3).bfloat16(), "x is torch.bfloat16, but the weights are torch.float32"),
        (torch.randn(1, 4, 1, 1), r"\[?\(?1, (4|16|24), 1, 1"),
    ],
)
def test_bad_input_is_refused_by_name(block, x, message, gradients):
    with pytest.raises(ValueError, match=message), torch.set_grad_enabled(gradients):
        block(x)


def test_a_norm_of_other_channels_is_refused():
    block = InvertedResidual(4, 4, expansion=2)
    block.bn2 = NormAct2d(6)
    with pytest.raises(ValueError, match=r"x \(2, 8, 3, 3\) has 8 channels, but this BatchNorm is made for 6"):
        block(torch.randn(2, 4, 3, 3))
