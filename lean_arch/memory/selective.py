"""Keep what is dear to recompute: the results of long reductions; everything else is computed again.

Each element of a matrix product or convolution costs as many multiplications as its reduction is long, while
every kept element costs the same bytes. So the rule is one number: results over a longer reduction than
`DEAR` are kept (projections, feed-forwards, dense convolutions, attention), those over a shorter one are not
(depthwise and first convolutions, the scores of one attention head, the expansion of a narrow MBConv), nor
norms, activations and dropout.

torch.utils.checkpoint.create_selective_checkpoint_contexts does the same, but raises where a kept result is
changed in place afterwards (a convolution before an in-place ReLU) and on a second backward pass. Here such
results are computed again.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEAR = 64  # multiplications per element: the width of an attention head, whose scores are not worth their bytes

aten = torch.ops.aten
LEFT_FACTOR = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}


def is_dear(func, args, kwargs) -> bool:
    if func in LEFT_FACTOR:
        return args[LEFT_FACTOR[func]].shape[-1] > DEAR
    if func is aten.convolution.default:
        return args[1][0].numel() > DEAR
    if "attention" in func.name():
        # a kept result draws no random numbers on replay, so the layers after it would draw others
        return not _named(func, args, kwargs).get("dropout_p", 0)
    return False


class _Numbered(TorchDispatchMode):
    """Tells the dear calls of a run apart in `kept`, {(op, nth call): result}."""

    def __init__(self, kept: dict):
        super().__init__()
        self.kept = kept
        self.calls = Counter()

    def next_key(self, func):
        self.calls[func] += 1
        return func, self.calls[func]


class Keep(_Numbered):
    """Around the first run: fills `kept`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._forget(_written(func, args, kwargs))
        elif is_dear(func, args, kwargs):
            # detached: `out` itself will point to a graph that points back here
            self.kept[self.next_key(func)] = tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        return out

    def _forget(self, storages: set[int]):
        for key in [key for key, out in self.kept.items() if storages & _storages(out)]:
            del self.kept[key]


class Reuse(_Numbered):
    """Around a replay: takes the results out of `kept`, and computes those that are not there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not func._schema.is_mutable and is_dear(func, args, kwargs):
            key = self.next_key(func)
            if key in self.kept:
                return self.kept.pop(key)
        return func(*args, **kwargs)


def _storages(values) -> set[int]:
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, torch.Tensor)}


def _named(func, args, kwargs) -> dict:
    return dict(zip((a.name for a in func._schema.arguments), args)) | kwargs


def _written(func, args, kwargs) -> set[int]:
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return _storages([value for name, value in _named(func, args, kwargs).items() if name in written])
