"""The optimizer's groups and the learning rate's course."""

import pytest
import timm

from lean_arch.training.config import InputError, TrainConfig
from lean_arch.training.optim import learning_rate, make_optimizer


def test_the_learning_rate_rises_then_falls():
    config = TrainConfig(lr=1e-2, min_lr=1e-4, warmup=0.25)
    rates = [learning_rate(config, step, 20) for step in range(1, 21)]
    assert rates[:5] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 1e-2])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(1e-4)
    # half-way down the cosine
    assert (rates[11] + rates[12]) / 2 == pytest.approx((1e-2 + 1e-4) / 2, rel=0.05)
    assert learning_rate(TrainConfig(lr=1.0, warmup=0.0), 1, 1) == TrainConfig().min_lr


def test_biases_and_norms_have_no_weight_decay():
    model = timm.create_model("test_vit", num_classes=3)
    groups = make_optimizer(TrainConfig(weight_decay=0.3), model).param_groups
    decayed = [p for group in groups for p in group["params"] if group["weight_decay"] == 0.3]
    spared = [p for group in groups for p in group["params"] if group["weight_decay"] == 0]
    assert len(decayed) + len(spared) == len(list(model.parameters()))
    assert all(p.ndim > 1 for p in decayed)
    assert any(p is model.norm.weight for p in spared)


def test_an_unknown_optimizer_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"adamx.*adamax"):
        make_optimizer(TrainConfig(optimizer="adamx"), timm.create_model("test_vit"))
