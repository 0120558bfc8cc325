"""The CNNs as other programs take them: ONNX in onnxruntime, compilers, torch.export, and maps in channels_last."""

import copy

import onnxruntime
import pytest
import torch

from lean_arch.models import create_model
from tests.blocks.twins import relative_error

NAMES = [
    "lean_mobilenetv1",
    "lean_mobilenetv2",
    "lean_mobilenetv3_small",
    "lean_mobilenetv4_conv_small",
    "lean_efficientnet_b0",
    "lean_convnext_atto",
    "lean_revnet",
]
EACH = pytest.mark.parametrize("name", NAMES)


def images(batch=2, size=64, dtype=torch.float32):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch)).to(dtype)


def trained(name, dtype=torch.float32, **options):
    """A model whose running statistics are those of a step."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=5, drop_path_rate=0.0, **options).to(dtype)
    model(images(4, dtype=dtype))
    return model


def assert_same_step(one, other, x, y):
    """Logits of x by one and of y by another, and all gradients; float64, for BatchNorm amplifies roundings."""
    for model, z in ((one, x), (other, y)):
        model(z).square().sum().backward()
    grads = [[p.grad for p in model.parameters()] for model in (one, other)]
    least = 1e-6 * max(g.norm() for g in grads[0])
    assert all(relative_error(g, w) <= 1e-8 for g, w in zip(*grads, strict=True) if w.norm() > least)
    assert relative_error(one.eval()(x), other.eval()(y)) <= 1e-8


@EACH
def test_onnx(name, tmp_path):
    """Of any batch size, in plain operators alone."""
    model, path = trained(name).eval(), tmp_path / "model.onnx"
    batch = torch.export.Dim("batch")
    torch.onnx.export(model, (images(),), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    session = onnxruntime.InferenceSession(path)
    for x in (images(2), images(3)):
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            near = 1e-4 if name == "lean_revnet" else 1e-5  # in PyTorch, its streams are fixed-point numbers
            assert relative_error(torch.from_numpy(got), model(x)) <= near


@EACH
def test_torch_export_of_training(name):
    model = trained(name)
    x = images()
    exported = torch.export.export(model, (x,)).module()
    assert relative_error(exported(x), copy.deepcopy(model)(x)) <= 1e-5


@pytest.mark.parametrize("name", ["lean_mobilenetv3_small", "lean_convnext_atto"])
def test_compiles_whole(name):
    model, x = trained(name, torch.float64), images(dtype=torch.float64)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert_same_step(compiled, model, x, x)


@pytest.mark.slow
def test_compiles_by_inductor():
    model = trained("lean_convnext_atto", torch.float64, depths=(1, 1, 1, 1))
    compiled, x = copy.deepcopy(model), images(dtype=torch.float64)
    compiled.compile(fullgraph=True)
    assert_same_step(compiled, model, x, x)


@EACH
def test_channels_last_is_kept_and_changes_nothing(name):
    model, x = trained(name, torch.float64), images(dtype=torch.float64)
    other, last = (t.to(memory_format=torch.channels_last) for t in (copy.deepcopy(model), x))
    assert_same_step(other, model, last, x)
    assert other.forward_features(last).is_contiguous(memory_format=torch.channels_last)
