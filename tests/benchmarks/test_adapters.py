"""The comparison of adapters: a row a method, with its figures or why there are none."""

import pytest

pytest.importorskip("peft")
from benchmarks import adapters


@pytest.fixture(scope="module", params=["test_vit", "test_resnet"])
def rows(request):
    found = adapters.compare(request.param, batch_size=2, img_size=160, precision="fp32", rounds=1, device="cpu")
    return {row["method"]: row for row in found}


def test_every_method_has_a_row(rows):
    assert list(rows) == list(adapters.METHODS)
    assert len({tuple(row) for row in rows.values()}) == 1
    assert rows["full fine-tuning"]["bytes_ratio"] == 1
    for row in rows.values():
        figures = [row[name] for name in adapters.FIGURES if name != "status"]
        assert all(figures) if row["status"] == "measured" else not any(figures)


def test_what_takes_few_layers_of_a_model_says_so(rows):
    row = rows["PEFT SHiRA, rank 8"]
    of_convolutions = row["arch"] == "test_resnet"
    assert row["status"] == ("takes nn.Linear only: 1 of 16 layers" if of_convolutions else "measured")


def test_adapters_train_and_save_little(rows):
    full = rows["full fine-tuning"]
    for row in rows.values():
        if row["status"] == "measured" and row is not full:
            assert row["optimizer_bytes"] == 8 * row["trained"]
            assert row["trained"] < full["trained"]
            assert row["file_bytes"] < full["file_bytes"]
    assert rows["sparse, 1% of columns"]["step_bytes"] < full["step_bytes"]
