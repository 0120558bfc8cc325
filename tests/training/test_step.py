"""One optimizer step: the gradients are those of the whole batch, however it is cut."""

import functools

import pytest
import timm
import torch
import torch.nn.functional as F

from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.data import Data
from lean_arch.training.recipe import Rehearsal
from lean_arch.training.step import Step, build_model


class Recorder(torch.optim.SGD):
    """Keeps the gradients it was given."""

    def step(self):
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        super().step()


def run(micro_batch_size, clip_grad=0.0):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=5, img_size=32).double()
    images, labels = torch.randn(10, 3, 32, 32).double(), torch.randint(5, (10,))
    optimizer = Recorder(model.parameters(), lr=0.1)
    step = Step(
        model,
        optimizer,
        Rehearsal("fp32"),
        functools.partial(Data.loss, label_smoothing=0.1),
        micro_batch_size=micro_batch_size,
        clip_grad=clip_grad,
    )
    want = F.cross_entropy(model(images).float(), labels, label_smoothing=0.1)
    gradients = torch.autograd.grad(want, list(model.parameters()))
    loss = step(images, labels)
    assert all(p.grad is None for p in model.parameters())
    return loss, optimizer.seen, want, gradients


@pytest.mark.parametrize("micro_batch_size", [10, 5, 4, 3, 1])
def test_micro_batches_give_the_gradients_of_the_whole_batch(micro_batch_size):
    loss, seen, want, gradients = run(micro_batch_size)
    torch.testing.assert_close(loss, want.detach(), rtol=1e-6, atol=0)
    assert not loss.requires_grad
    for got, expected in zip(seen, gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-7)


def test_clipping_acts_on_all_micro_batches_together():
    _, seen, _, gradients = run(4, clip_grad=0.01)
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    for got, expected in zip(seen, gradients, strict=True):
        torch.testing.assert_close(got, expected * 0.01 / norm, rtol=1e-3, atol=1e-8)


def test_the_seed_settles_the_weights():
    data = Data(None, None, num_classes=4, in_chans=1, img_size=32)
    a, b, c = (build_model(TrainConfig(arch="test_vit", seed=seed), data) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.patch_embed.proj.weight, c.patch_embed.proj.weight)
    assert a.patch_embed.proj.weight.shape[1] == 1
    assert a(torch.zeros(1, 1, 32, 32)).shape == (1, 4)


def test_a_convolutional_net_needs_no_image_size():
    data = Data(None, None, num_classes=4, in_chans=1, img_size=24)
    assert build_model(TrainConfig(arch="test_resnet"), data)(torch.zeros(2, 1, 24, 24)).shape == (2, 4)


@pytest.mark.parametrize(
    ("arch", "loud"), [("test_efficientnet", True), ("test_vit", False), ("deit_tiny_distilled_patch16_224", False)]
)
def test_a_classifier_begins_no_louder_than_its_inputs(arch, loud):
    data = Data(None, None, num_classes=4, in_chans=3, img_size=32)
    model = build_model(TrainConfig(arch=arch, seed=5), data)
    torch.manual_seed(5)
    drawn = timm.create_model(arch, num_classes=4, **{} if loud else {"img_size": 32})
    for (name, got), want in zip(model.named_parameters(), drawn.parameters(), strict=True):
        if loud and name == "classifier.weight":
            assert got.std().item() == pytest.approx(256**-0.5)
            want = want * (got.std() / want.std())
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("options", "size", "words"),
    [
        ({"arch": "test_vot"}, 32, "test_vot.*test_vit"),
        ({"arch": "vit_tiny_patch16_224"}, 40, "img_size 40 .*16.*32 or 48"),
        ({"arch": "vgg11", "drop_path_rate": 0.1}, 32, "drop_path_rate 0.1 .*vgg11"),
    ],
)
def test_what_an_arch_cannot_be_is_refused(options, size, words):
    with pytest.raises(InputError, match=words):
        build_model(TrainConfig(**options), Data(None, None, num_classes=4, in_chans=3, img_size=size))
