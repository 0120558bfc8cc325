"""lean_frozen on whole models: same results, gradients as documented, less memory; and back without a trace."""

import copy
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lean_arch.adapters.frozen import MIXINS, Lean, lean_frozen, restore_frozen
from lean_arch.memory import apply_checkpointing
from lean_arch.ops.frozen.smooth import grid_of
from tests.ruler import peak_bytes

CNNS = {"resnet18": 64, "convnext_atto": 64, "mobilenetv3_small_050": 64, "dla34": 64}
ERROR = {"compressed": 0.02, "compressed:4": 0.15, "compressed:2": 0.5}  # of a small ViT's gradient, by norm


def build(arch, trained="bias", **options):
    torch.manual_seed(0)
    model = timm.create_model(arch, num_classes=10, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(trained))
    return model


def vit(**options):
    return build("vit_tiny_patch16_224", img_size=64, depth=4, **options)


def images(size, batch=3):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def step(model, x, autocast=False):
    """(loss's logits, gradients of what is trained)"""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    F.cross_entropy(out.float(), torch.arange(len(x))).backward()
    return out, torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def compare(model, x, activations, tolerance, autocast=False):
    twin = copy.deepcopy(model)
    lean_frozen(twin, activations)
    want, got = (step(m, x, autocast) for m in (model, twin))
    assert torch.equal(want[0], got[0])
    assert len(want[1]) == len(got[1])
    error = ((want[1] - got[1]).norm() / want[1].norm()).item()
    assert error <= tolerance
    for ours, theirs in zip(twin.buffers(), model.buffers()):
        assert torch.equal(ours, theirs)
    return error


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("arch", CNNS)
def test_convolutional_nets(arch, training):
    model, x = build(arch).train(training), images(CNNS[arch], batch=6)
    compare(model, x, "exact", 2e-5)
    compare(model, x, "compressed", 0.03)


def test_vit():
    model, x = vit(), images(64)
    compare(model, x, "exact", 1e-6)
    compare(model, x, "exact", 0.02, autocast=True)  # bias gradients, which PyTorch sums in 16 bits here
    errors = [compare(model, x, activations, tolerance) for activations, tolerance in ERROR.items()]
    assert errors == sorted(errors)


def test_half_precision():
    model = vit().bfloat16()
    compare(model, images(64).bfloat16(), "exact", 0.03)


@pytest.mark.parametrize("trained", ["head.weight", "blocks.2.mlp.fc1.weight", "norm1.weight", "weight", "bias"])
def test_whatever_is_trained(trained):
    """What requires a gradient is asked at every call, not when the model was changed."""
    model = vit(trained=trained)
    compare(model, images(64), "exact", 1e-6)
    twin = lean_frozen(vit())
    for ours, theirs in zip(twin.parameters(), model.parameters()):
        ours.requires_grad_(theirs.requires_grad)
    assert torch.equal(step(twin, images(64))[0], step(model, images(64))[0])
    for ours, theirs in zip(twin.parameters(), model.parameters()):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() + 1e-7


def test_dropout_draws_the_same_numbers():
    model = build("vit_tiny_patch16_224", img_size=32, depth=2, drop_rate=0.3, proj_drop_rate=0.2, drop_path_rate=0.1)
    compare(model.train(), images(32), "exact", 1e-6)


def peak(model, x, autocast=False):
    return peak_bytes(lambda: step(model, x, autocast))


def test_memory_of_a_resnet_falls():
    model, x = build("resnet34").eval(), images(96, batch=8)
    plain = peak(model, x)
    assert peak(lean_frozen(model), x) < 0.36 * plain
    model.train()
    assert peak(model, x) < 0.65 * plain
    assert peak(lean_frozen(model, "compressed"), x) < 0.38 * plain


@pytest.mark.parametrize(
    ("arch", "size", "options", "shares"),
    [
        ("vit_tiny_patch16_224", 160, {"img_size": 160, "depth": 6}, (1.001, 0.71, 0.65)),
        ("convnext_atto", 96, {}, (0.52, 0.3, 0.28)),
    ],
)
def test_memory_of_transformers_falls(arch, size, options, shares):
    """Of a ViT in float32, "exact" finds nothing that PyTorch keeps in vain."""
    model, x = build(arch, **options), images(size, batch=8)
    plain = peak(model, x)
    for activations, share in zip(("exact", "compressed", "compressed:2"), shares):
        assert peak(lean_frozen(model, activations), x) < share * plain, activations


def test_autocast_keeps_no_copies_of_weights():
    model, x = build("vit_tiny_patch16_224", img_size=32, depth=4), images(32, batch=1)
    peaks = [peak(m, x, autocast=True) for m in (model, lean_frozen(copy.deepcopy(model)))]
    weights = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    assert peaks[0] - peaks[1] > weights  # two bytes each, less what a layer makes for itself


def test_back_without_a_trace():
    model = build("resnet18")
    model.layer1[0].conv1.register_forward_hook(lambda module, args, out: None)
    classes = [type(m) for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    keys = list(model.state_dict())
    assert lean_frozen(model) is model
    assert sum(isinstance(m, Lean) for m in model.modules()) > 30
    assert isinstance(model.conv1, nn.Conv2d)
    assert type(model.conv1).__name__ == "Conv2d"
    assert list(model.state_dict()) == keys
    lean_frozen(model, "compressed")  # a second call takes the first one's place
    assert restore_frozen(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes


def test_copies_and_pickles():
    model, x = lean_frozen(build("resnet18").eval(), "compressed"), images(64)
    want = step(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, step(other, x), want))
        restore_frozen(other)
        assert not any(isinstance(m, Lean) for m in other.modules())
    assert isinstance(model.conv1, Lean)


@pytest.mark.filterwarnings("ignore")
def test_compilers_see_the_layers_as_they_were():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.LayerNorm(7), nn.GELU()
    model, x = lean_frozen(nn.Sequential(*layers).requires_grad_(False).eval()), images(16)
    want = model(x)
    others = (
        torch.jit.script(copy.deepcopy(model)),
        torch.jit.trace(model, x),
        torch.compile(model, backend="aot_eager", fullgraph=True),
        torch.export.export(model, (x,)).module(),
    )
    for other in others:
        torch.testing.assert_close(other(x), want)
    assert all(isinstance(m, Lean) for m in model)
    with torch.no_grad():
        assert torch.equal(model(x), want)
    gradient = torch.func.grad(lambda x: model(x).sum())(x)
    x.requires_grad_()
    model(x).sum().backward()
    assert (gradient - x.grad).norm() < 1e-5 * gradient.norm()


def test_under_checkpointing():
    for activations in ("exact", "compressed"):
        model, x = build("resnet18"), images(64)
        twin = lean_frozen(copy.deepcopy(model), activations)
        want = step(twin, x)
        apply_checkpointing(twin, "all")
        got = step(twin, x)
        assert torch.equal(want[0], got[0])
        assert (want[1] - got[1]).norm() <= 1e-6 * want[1].norm()


def test_layers_of_all_kinds():
    """Each kind of layer that is known, in a chain with others that write over their results."""
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect"),
        nn.GroupNorm(2, 8),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=4),
        nn.BatchNorm2d(8),
        nn.ReLU6(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.BatchNorm2d(8, affine=False, momentum=None),
        nn.SiLU(inplace=True),
        nn.Flatten(2),
        nn.Conv1d(8, 8, 3, padding=1),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.Hardswish(inplace=True),
        nn.Flatten(1),
        nn.LazyLinear(12),
        nn.LayerNorm(12, elementwise_affine=False),
        nn.GELU("tanh"),
        nn.RMSNorm(12),
        nn.Dropout(0.2),
        nn.Mish(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.Linear(12, 10),
    )
    x = images(16, batch=4)
    layers(x)
    layers.requires_grad_(False)
    layers[0].bias.requires_grad_()
    for training in (True, False):
        layers.train(training)
        compare(layers, x, "exact", 1e-5)
        compare(layers, x, "compressed", 0.05)
    lean_frozen(layers)
    assert {i for i, m in enumerate(layers) if not isinstance(m, Lean)} == {10, 14}


def test_norms_and_activations_of_other_libraries():
    transformers = pytest.importorskip("transformers.activations")
    from timm.layers import BatchNormAct2d, LayerNorm2d, RmsNorm
    from timm.layers.activations import HardSwish, QuickGELU, Swish
    from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    tokens, maps = torch.randn(5, 7, 24), torch.randn(3, 24, 5, 6)
    layers = [
        *((layer(24), tokens) for layer in (RmsNorm, GemmaRMSNorm, LlamaRMSNorm, T5LayerNorm)),
        (ConvNextLayerNorm(24, data_format="channels_last"), tokens),
        (ConvNextLayerNorm(24, data_format="channels_first"), maps),
        (LayerNorm2d(24), maps),
        (BatchNormAct2d(24).eval(), maps),
        (BatchNormAct2d(24, act_layer=nn.SiLU), maps),
        *((layer(), tokens) for layer in (HardSwish, QuickGELU, Swish)),
        *((transformers.ACT2FN[name], tokens) for name in ("gelu", "gelu_new", "quick_gelu", "gelu_python", "silu")),
        *((transformers.ACT2FN[name], tokens) for name in ("gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "mish")),
    ]
    for layer, x in layers:
        x = x.clone().requires_grad_()
        for parameter in layer.parameters():
            nn.init.uniform_(parameter.requires_grad_(False), 0.5, 1.5)
        upstream = torch.randn_like(x)
        for activations, tolerance in (("exact", 1e-6), ("compressed", 0.01)):
            twin = lean_frozen(copy.deepcopy(layer), activations)
            assert isinstance(twin, Lean), layer
            out, want = twin(x), layer(x)
            assert torch.equal(out, want), layer
            got, want = (torch.autograd.grad(y, x, upstream)[0] for y in (out, want))
            assert (got - want).norm() <= tolerance * want.norm(), layer


def test_the_classes_that_are_known_by_name_are_there():
    import importlib

    pytest.importorskip("transformers")
    for home in MIXINS:
        module, _, name = home.rpartition(".")
        assert "forward" in vars(getattr(importlib.import_module(module), name)), home


def test_convolutions_with_a_forward_of_their_own():
    from timm.layers import Conv2dSame, StdConv2d

    class Doubled(nn.Conv2d):
        def forward(self, input):
            return super().forward(2 * input)

    class Shifted(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight + 1, bias)

    x = images(17).double()  # behind StdConv2d, whose weights have no mean, the bias's gradient is what sums leave over
    for kind in (Conv2dSame, StdConv2d, Doubled, Shifted):
        chain = nn.Sequential(nn.Conv2d(3, 8, 1), kind(8, 8, 3, 2), kind(8, 8, 3)).double().requires_grad_(False)
        chain[0].bias.requires_grad_()
        chain.append(nn.Flatten())
        compare(chain, x, "exact", 1e-6)
        lean_frozen(chain)
        assert {"_ConvolveBackward"} <= nodes(chain(x))
        chain[1].weight.requires_grad_()
        chain[2].requires_grad_()
        hidden = chain[:1](x)
        assert "_ConvolveBackward" in nodes(hidden)
        assert "_ConvolveBackward" not in nodes(chain[1:](hidden.detach()))


def nodes(out):
    """Names of the operators in the graph of `out`."""
    todo, seen = [out.grad_fn], set()
    while todo:
        node = todo.pop()
        seen.add(node.name())
        todo += [n for n, _ in node.next_functions if n is not None]
    return seen


def test_what_is_left_alone():
    class MyRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x):
            return 3 * F.rms_norm(x, (8,), self.weight, self.eps)

    class MyGELU(nn.GELU):
        def forward(self, input):
            return 2 * super().forward(input)

    adapted, called = nn.ReLU(), nn.ReLU()
    adapted.adapters = nn.ModuleDict()
    called.forward = torch.tanh
    model = lean_frozen(nn.ModuleList([nn.ConvTranspose2d(3, 3, 2), MyRMSNorm(), MyGELU(), adapted, called]))
    assert not any(isinstance(m, Lean) for m in model.modules())


def test_fake_tensors_run_through():
    """As a planner does, which asks for bytes and has no numbers."""
    grid_of.cache_clear()
    model = lean_frozen(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.GELU()), "compressed:2")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 3, 8, 8, requires_grad=True)
        model(x).sum().backward()
        assert x.grad.shape == x.shape
    assert not isinstance(torch.tensor(grid_of("gelu", 2).levels), FakeTensor)


def test_layers_take_their_arguments_by_name():
    conv = lean_frozen(nn.Conv2d(3, 4, 1).requires_grad_(False))
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    assert torch.equal(conv(input=x), conv(x))


def test_unknown_activations_are_refused_and_change_nothing():
    model = lean_frozen(build("resnet18"), "compressed")
    with pytest.raises(ValueError, match="activations 'tiny' is unknown: use one of exact, compressed"):
        lean_frozen(model, "tiny")
    assert model.act1.bits == 8
