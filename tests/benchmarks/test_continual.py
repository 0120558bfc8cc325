"""The benchmark of forgetting: what a fact is, that its tasks are apart, the rule for rates, a row of each method."""

import ast

import pytest
import torch

from benchmarks import continual, stdlib_facts

SOURCE = """
def plain(a, b, /, *rest, c=1, **more): pass
class Kind:
    def method(self, x): pass
    async def wait(cls): pass
"""


def test_functions_and_their_parameters():
    assert list(stdlib_facts.functions(ast.parse(SOURCE), ["m"])) == [
        (["m", "plain"], ("a", "b", "*rest", "c", "**more")),
        (["m", "Kind", "method"], ("x",)),
        (["m", "Kind", "wait"], ()),
    ]


@pytest.fixture
def few_facts(monkeypatch):
    """Of 8 packages, 12 each."""
    names = [f"p{n}" for n in range(9)]
    facts = [
        (f"pkg{p}", [f"pkg{p}", ".", f"f{n}", "("], [names[(p + n) % 9], names[p * n % 9], ")"])
        for p in range(8)
        for n in range(12)
    ]
    monkeypatch.setattr(stdlib_facts, "all_facts", lambda: facts)
    monkeypatch.setattr(continual, "tasks", lambda seed: stdlib_facts.two_tasks(seed, 60, 24))


def test_tasks_share_words_and_no_facts(few_facts):
    (old, _), (new, targets), vocabulary = stdlib_facts.two_tasks(3, 60, 24)
    assert (len(old), len(new)) == (60, 24)
    assert not {row[0].item() for row in old} & {row[0].item() for row in new}
    assert max(old.max(), new.max()) == vocabulary - 1
    counted = targets >= 0
    assert counted.sum(1).tolist() == [3] * 24
    assert torch.equal(targets[:, 3:6], new[:, 4:7])
    other, *_ = stdlib_facts.two_tasks(4, 60, 24)
    assert not torch.equal(other[0], old)


def test_the_rate_that_forgets_least_of_those_that_learn():
    rows = [
        {"learning_rate": rate, "new_after": new, "old_after": old}
        for rate, new, old in ((1, 0.90, 0.9), (2, 0.96, 0.6), (3, 1.0, 0.5), (4, 0.99, 0.1))
    ]
    assert continual.chosen(rows) == 2


@pytest.mark.parametrize("method", continual.METHODS)
def test_a_row_of_each_method(method, few_facts, tmp_path, monkeypatch):
    monkeypatch.setattr(continual, "BASE_EPOCHS", 3)
    monkeypatch.setattr(continual, "EPOCHS", 2)
    monkeypatch.setattr(continual, "BATCH", 8)
    monkeypatch.setitem(continual.MEMORY, "num_keys", 16)
    continual.base(1, tmp_path)
    row = continual.compare(method, 1, 1e-2, tmp_path)
    assert list(row)[:6] == ["method", "seed", "old_before", "new_before", "old_after", "new_after"]
    assert all(0 <= row[name] <= 1 for name in list(row)[2:6])
    assert row["trained"] > 0
