"""Mixins join and leave a module's class in any order, and survive copies and pickles."""

import copy
import pickle

import torch
from torch import nn

from lean_arch.ops.subclass import Mixin, become, options_of, revert


class Doubled(Mixin):
    def forward(self, x):
        return 2 * super().forward(x)


class Raised(Mixin):
    def forward(self, x):
        return super().forward(x) + options_of(self, Raised)[0]


def test_mixins_stack_and_leave_in_any_order():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain = layer(x)
    become(layer, Raised, 5)
    become(layer, Doubled)
    assert type(layer).__name__ == "Linear"
    assert isinstance(layer, nn.Linear)
    assert torch.equal(layer(x), 2 * (plain + 5))
    revert(layer, Raised)
    assert torch.equal(layer(x), 2 * plain)
    revert(layer, Mixin)
    assert type(layer) is nn.Linear


def test_copies_and_pickles_keep_them():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    become(layer, Raised, 5)
    become(layer, Doubled)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        revert(other, Doubled)
        assert torch.equal(other(x), nn.Linear.forward(layer, x) + 5)


def test_the_same_mixture_is_the_same_class():
    first, second = nn.Linear(3, 2), nn.Linear(5, 1)
    for layer in (first, second):
        become(layer, Raised, 1)
    assert type(first) is type(second)
