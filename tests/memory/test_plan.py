"""plan() and forecast() against measure() of the same step, and the search for a recipe that fits."""

import functools
import sys

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import lean_arch
from lean_arch.memory import BudgetError, format_bytes, measure, parse_bytes, plan
from lean_arch.memory.plan import Recipe, plain_step
from lean_arch.memory.scratch import Probe, probe, rule
from lean_arch.memory.trace import fake_copy, forecast
from tests.ruler import peak_bytes

planner = sys.modules["lean_arch.memory.plan"]  # the name itself is the function

aten = torch.ops.aten
SMALL_VIT = functools.partial(
    timm.create_model, "vit_tiny_patch16_224", img_size=64, num_classes=10, embed_dim=96, depth=3
)


def measured(model, batch, **options):
    given = {"batch_size": len(batch[0]), "micro_batch_size": len(batch[0]), "precision": "fp32", "checkpoint": "none"}
    recipe = Recipe(**given | {"optimizer": "adamw", "clip_grad": 0.0} | options)
    step, *held = plain_step(model.train(), *batch, recipe)
    step()
    return measure(step, *held, *batch)


def batch_of(size, side=64):
    return torch.randn(size, 3, side, side), torch.randint(10, (size,))


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (SMALL_VIT, {}),
        (SMALL_VIT, {"clip_grad": 1.0, "optimizer": "sgd"}),
        (SMALL_VIT, {"micro_batch_size": 2}),
        (functools.partial(timm.create_model, "resnet18", num_classes=10), {}),
        (functools.partial(timm.create_model, "mobilenetv3_small_050", num_classes=10), {}),
        (functools.partial(timm.create_model, "convnext_atto", num_classes=10), {}),
        (functools.partial(lean_arch.create_model, "lean_revnet", depths=(2, 1, 1, 1), widths=(64, 16, 16, 16)), {}),
    ],
)
def test_predicted_is_measured(build, options):
    model, batch = build(), batch_of(6)
    truth = measured(model, batch, **options)
    guess = plan(model, batch, **{"checkpoint": "none", "micro_batch_size": 6} | options)
    assert guess.predicted_peak_bytes == pytest.approx(truth.peak_bytes, rel=0.005)
    for category in ("weights", "optimizer", "other"):
        assert guess.best.predicted.by_category[category] == pytest.approx(truth.by_category[category], rel=0.02)


def test_predicted_is_measured_in_bf16():
    model, batch = SMALL_VIT(), batch_of(2)
    truth = measured(model, batch, precision="bf16")
    assert plan(model, batch, precision="bf16").predicted_peak_bytes == pytest.approx(truth.peak_bytes, rel=0.005)


@pytest.mark.parametrize("arch", ["lean_reformer_tiny", "lean_lm_tiny"])
def test_predicted_is_measured_of_sequences(arch):
    """Whose peak holds the scratch of the package's own operators."""
    model = lean_arch.create_model(arch).train()
    batch = torch.randint(250, (4, 256)), torch.randint(250, (4, 256))

    def make_step(model, inputs, targets, recipe):
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(inputs, targets=targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step, model, optimizer

    step, *held = make_step(model, *batch, None)
    step()
    truth = measure(step, *held, *batch)
    guess = plan(model, batch, make_step=make_step, checkpoint="none")
    assert guess.predicted_peak_bytes == pytest.approx(truth.peak_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.native_layer_norm.default, lambda: (torch.randn(4, 64, 50).mT, [64], None, None, 1e-5)),
        (aten.native_batch_norm.default, lambda: (torch.randn(4, 64, 9, 9), *4 * [torch.ones(64)], True, 0.1, 1e-5)),
        (aten.roll.default, lambda: (torch.randn(4, 14, 14, 32), [3, 3], [1, 2])),
        (aten.mean.dim, lambda: (torch.randn(4, 64, 9, 9).bfloat16(), [2, 3])),
        (aten.add.Tensor, lambda: (torch.randn(64, 99), torch.randn(64, 99).bfloat16())),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            lambda: tuple(torch.randn(2, 3, 300, 32) for _ in range(3)),
        ),
    ],
)
def test_each_rule_is_what_the_kernel_takes(func, args):
    args, kept = args(), []
    with torch.no_grad():
        func(*args)
        taken = peak_bytes(lambda: kept.append(func(*args)), warmup=0)
    results = sum(t.untyped_storage().nbytes() for t in (kept[0] if isinstance(kept[0], tuple) else kept))
    assert rule(func, args, {}, kept[0]) == pytest.approx(taken - results, abs=64)
    assert taken > results


@pytest.fixture
def one_thread():
    """Which convolves otherwise than two do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kernel", "batch"), [(3, 11), (1, 11), (1, 18), (1, 33)])
def test_probe_extends_small_batches_to_a_large_one(kernel, batch, one_thread):
    images, weight = torch.randn(batch, 16, 20, 20), torch.randn(24, 16, kernel, kernel)
    stride, padding = [min(kernel, 2)] * 2, [kernel // 2] * 2
    args = (images, weight, None, stride, padding, [1, 1], False, [0, 0], 1)
    kept = []
    taken = peak_bytes(lambda: kept.append(aten.convolution.default(*args)), warmup=0)
    assert probe([Probe(aten.convolution.default, args, {})]) == [taken - kept[0].nbytes]


def test_flops_are_those_of_the_matrix_products():
    model = nn.Linear(32, 10, bias=False)

    def build():
        copy, x = fake_copy(model), torch.empty(8, 32)
        return lambda: F.cross_entropy(copy(x), torch.zeros(8, dtype=torch.int64)).backward(), copy, x

    assert forecast(build).flops == 2 * 2 * 8 * 32 * 10


def test_the_model_is_left_as_it_was():
    model, batch = SMALL_VIT().eval(), batch_of(4)
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    plan(model, batch, budget="1GiB")
    assert not model.training
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])
        assert tensor.grad is None


def test_a_smaller_budget_gives_a_leaner_recipe_that_fits():
    model, batch = SMALL_VIT(), batch_of(16)
    whole = plan(model, batch)
    assert (whole.best.micro_batch_size, whole.best.checkpoint) == (16, "none")
    budget = int(whole.predicted_peak_bytes * 0.85)
    lean = plan(model, batch, budget=budget)
    assert lean.predicted_peak_bytes <= budget
    assert lean.best.micro_batch_size < 16
    assert lean.best.accumulation_steps * lean.best.micro_batch_size == 16
    args = lean.to_args()
    assert args[args.index("--micro_batch_size") + 1] == str(lean.best.micro_batch_size)


def test_checkpointing_is_foreseen():
    model, batch = SMALL_VIT(), batch_of(16)
    plain, lean = (plan(model, batch, checkpoint=policy) for policy in ("none", "all"))
    assert lean.predicted_peak_bytes < 0.9 * plain.predicted_peak_bytes
    assert lean.predicted_step_flops > 1.15 * plain.predicted_step_flops


def test_nothing_fits():
    with pytest.raises(BudgetError, match=r"budget 1MiB is too small: the least that would do is \d+\.\d MiB"):
        plan(SMALL_VIT, batch_of(2), budget="1MiB", checkpoint="none")


def test_a_hopeless_budget_is_refused_after_the_smallest_recipes(monkeypatch):
    sizes = []
    predict = planner._predict
    monkeypatch.setattr(planner, "_predict", lambda m, s, r, f: sizes.append(r.micro_batch_size) or predict(m, s, r, f))
    with pytest.raises(BudgetError, match=r"budget 1\.0 MiB is too small.* with micro_batch_size 1 "):
        plan(SMALL_VIT, batch_of(64), budget=2**20)
    assert sizes == [1] * len(planner.POLICIES)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": "lots"}, "budget 'lots' is not an amount of memory"),
        ({"precision": "int8"}, "precision 'int8' must be one of bf16, fp16, fp32"),
        ({"batch_size": 0}, "batch_size 0 must be 1 or more"),
        ({"micro_batch_size": 3}, "micro_batch_size 3 is more than batch_size; 2 is the most"),
        ({"device": "cuda"}, "device 'cuda' cannot be planned for"),
        ({"optimizer": "adamx"}, "optimizer 'adamx' is not in torch.optim"),
    ],
)
def test_bad_input_ends_in_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(nn.Linear(4, 2), (torch.empty(2, 4), torch.empty(2, dtype=torch.int64)), **options)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 2**32), ("500MB", 5 * 10**8), ("1.5 KiB", 1536), ("123B", 123), ("123", 123), (7, 7)],
)
def test_bytes_are_parsed(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "4 parsecs", "-1", "0", "1e9", "4GiB/s"])
def test_bytes_that_do_not_parse(text):
    with pytest.raises(ValueError, match="write it like 4GiB"):
        parse_bytes(text)


def test_bytes_are_written():
    assert [format_bytes(n) for n in (5, 1536, 3 * 2**20, 2**32)] == ["5 B", "1.5 KiB", "3.0 MiB", "4.00 GiB"]
