"""Depthwise-separable blocks: their textbook form to the bit, whatever they keep, in a part of its memory."""

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lean_arch.blocks import InvertedResidual, NormAct2d, SeparableConv2d
from lean_arch.blocks.norm_act import KEEP
from lean_arch.ops.norm_act import reference
from tests.blocks.twins import assert_alike, compare, maps, relative_error, scattered, step, textbook
from tests.ruler import allocations, peak_bytes

NEAR = ("conv_dw.weight",)  # by another kernel than PyTorch's
BLOCKS = {
    "inverted": functools.partial(InvertedResidual, 6, 6, kernel_size=5, expansion=3, act="silu"),
    "inverted, halved": functools.partial(InvertedResidual, 6, 9, stride=2, expansion=2.5),
    "inverted, excited": functools.partial(InvertedResidual, 6, 6, expansion=4, act="hardswish", se_channels=3),
    "inverted, dropped": functools.partial(InvertedResidual, 6, 6, expansion=2, act="gelu", drop_path_rate=0.5),
    "inverted, dear": functools.partial(InvertedResidual, 40, 8, expansion=0.5, act="relu"),
    "separable": functools.partial(SeparableConv2d, 6, 10, stride=2),
    "separable, excited": functools.partial(SeparableConv2d, 6, 6, act="hardswish", skip=True, se_channels=2),
    "separable, linear": functools.partial(
        SeparableConv2d, 6, 6, kernel_size=5, dilation=2, act="silu", pointwise_act=False, skip=True, drop_path_rate=0.4
    ),
}
VARIED = "inverted, excited", "inverted, dear", "separable, linear"
each_block = pytest.mark.parametrize("name", BLOCKS)
each_keep = pytest.mark.parametrize("keep", KEEP)


def build(name, keep="inputs", **options):
    torch.manual_seed(0)
    return scattered(BLOCKS[name](keep=keep, **options)).train()


def maps_for(block, batch=5, size=(9, 7), **how):
    first = next(m for m in block.modules() if isinstance(m, nn.Conv2d))
    return maps(batch, first.in_channels, *size, **how)


def norms_of(block):
    return [m for m in block.modules() if isinstance(m, nn.BatchNorm2d)]


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
    compare(block, x, near=("grad", "y", "running"), tolerance=1e-5)


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
    block = (
        InvertedResidual(*sizes, expansion=number(1, 4), **options)
        if some(0, 1)
        else SeparableConv2d(*sizes, **options)
    )
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
    (grad,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
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
    near = [i for i, g in enumerate(want.values()) if g.shape == block.conv_dw.weight.shape]
    got = run(block)
    for key, w in want.items():
        assert relative_error(got[key], w) < 2e-6 if key in near else torch.equal(got[key], w), key


@each_keep
@each_block
def test_no_gradients_no_lean_pass(name, keep):
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
        return  # PyTorch's hook refuses an activation in place
    heard, results = ([], []), []
    for block, ears in zip([build("inverted, excited") for _ in range(2)], heard):
        LISTENERS[kind](block.get_submodule(part), ears)
        with textbook() if ears is heard[1] else torch.enable_grad():
            results.append(step(block, maps_for(block)))
    assert_alike(*results, near=NEAR)
    assert len(heard[0]) == len(heard[1]) == 1
    assert torch.equal(heard[0][0], heard[1][0])


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


@pytest.mark.parametrize("name", ["inverted, excited", "separable, linear"])
def test_compiles_and_exports(name):
    block = build(name, drop_path_rate=0.0)
    x = maps_for(block)
    compiled = copy.deepcopy(block)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert_alike(step(compiled, x), step(block, x), near=("",), tolerance=1e-5)
    block.eval()
    assert torch.equal(torch.export.export(block, (x.detach(),)).module()(x.detach()), block(x))


def test_scripts():
    block = build("inverted, excited")
    assert_alike(
        step(torch.jit.script(copy.deepcopy(block)), maps_for(block)), step(block, maps_for(block)), near=("",)
    )


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


@pytest.mark.parametrize("block", [InvertedResidual, SeparableConv2d])
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
    ],
)
def test_bad_sizes_are_refused_by_name(block, change, message):
    if "expansion" in change and block is SeparableConv2d:
        return
    with pytest.raises(ValueError, match=message):
        block(**{"in_channels": 5, "out_channels": 5} | change)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("block", [InvertedResidual(4, 4), SeparableConv2d(4, 6)])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 5, 3, 3), r"x must be \(B, 4, H, W\), got \(2, 5, 3, 3\)"),
        (torch.randn(4, 3, 3), r"x must be \(B, 4, H, W\), got \(4, 3, 3\)"),
        (torch.ones(2, 4, 3, 3, dtype=torch.int64), "x is torch.int64, but the weights are torch.float32"),
        (torch.randn(2, 4, 3, 3).double(), "x is torch.float64, but the weights are torch.float32"),
        (torch.randn(2, 4, 3, 3).bfloat16(), "x is torch.bfloat16, but the weights are torch.float32"),
        (torch.randn(1, 4, 1, 1), r"\[?\(?1, (4|24), 1, 1"),
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
