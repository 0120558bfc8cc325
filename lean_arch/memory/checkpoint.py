"""Activation checkpointing of any model, from outside: blocks keep their inputs and run again during backward.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv:1604.06174).

The module tree stays: a checkpointed module is the same object, of a subclass of its class, which "none" gives back.
"""

import contextlib
import functools
import math
import threading

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lean_arch.memory.selective import Keep, Reuse
from lean_arch.memory.units import cut, find_blocks
from lean_arch.ops.convolution import small_map_convolutions
from lean_arch.ops.replay import autocast_as_now
from lean_arch.ops.subclass import Mixin, become, options_of, revert

POLICIES = "none", "all", "sqrt", "selective"
OWN_SWITCHES = "grad_checkpointing", "gradient_checkpointing", "memory_efficient"  # timm, transformers, DenseNets
_SWITCHED_OFF = "_own_checkpointing_before"


def apply_checkpointing(model: nn.Module, policy: str | int) -> nn.Module:
    """Makes `model` keep less for the backward pass; results and gradients stay the same. Returns `model`.

    It is changed in place, and another call replaces the policy. The policies:

    - "none": as if never called.
    - "all": every block keeps its input alone and runs again during backward.
    - "selective": as "all", but blocks keep the results of long reductions (dense layers, convolutions,
      attention) too and recompute only norms, activations, dropout and depthwise convolutions.
    - an int k: the blocks are joined into k segments of even length, which keep the input of their first block.
    - "sqrt": as the int nearest to the square root of the number of blocks.

    Blocks are found in the module tree (see `lean_arch.memory.units`): repeated children of Sequential, ModuleList
    or ModuleDict at any depth; stems, heads and downsamplings are checkpointed besides, each on its own. In a
    model without repeated children its parts count as blocks, and in a Sequential each layer with the norms and
    activations behind it. Only blocks that follow each other in one Sequential can be joined; a
    ModuleList's are called one by one by code that is not ours, so each is a segment, and there may be more than k.

    Dropout and stochastic depth replay the same numbers, autocast is kept (without its weight cache), BatchNorm
    updates its running statistics once. A module whose forward changes other state of its own is not safe to run
    again. Where nothing is recorded for backward (no_grad, inference) forward runs plainly. Reversible stacks
    keep nothing already and are left alone; a model's own checkpointing is switched off while a policy holds.

    Raises ValueError for an unknown policy, k < 1, or more segments than blocks (the model is then unchanged).
    """
    if not (policy in POLICIES or (isinstance(policy, int) and not isinstance(policy, bool))):
        known = ", ".join(POLICIES)
        raise ValueError(f"checkpoint policy {policy!r} is unknown: use one of {known} or a number of segments")
    before = {module: type(module) for module in model.modules() if isinstance(module, _Checkpointed)}
    for module in before:
        revert(module, _Checkpointed)
    if policy == "none":
        _restore_own_checkpointing(model)
        return model
    blocks = find_blocks(model)
    counted = [block for block in blocks if block.counted]
    if isinstance(policy, int) and not 1 <= policy <= len(counted):
        for module, cls in before.items():
            module.__class__ = cls
        raise ValueError(f"checkpoint policy {policy} does not suit this model: 1 to {len(counted)} segments work")
    segments = {"all": len(counted), "selective": len(counted), "sqrt": round(math.sqrt(len(counted)))}
    joined = cut(counted, segments.get(policy, policy)) + [[block] for block in blocks if not block.counted]
    _switch_off_own_checkpointing(model)
    _swap(joined, selective=policy == "selective")
    return model


def _swap(segments, selective):
    spans = {}  # Sequential -> where its checkpointed runs of children begin and end
    for segment in segments:
        modules = [module for block in segment for module in block.modules]
        if len(modules) > 1:
            spans.setdefault(segment[0].chain, []).append((segment[0].start, segment[-1].stop))
        elif any(True for _ in modules[0].children()):  # a lone layer keeps its input anyway
            _become(modules[0], _Unit, selective)
    for chain, places in spans.items():
        _become(chain, _Chain, selective, tuple(sorted(places)))


def _switch_off_own_checkpointing(model):
    for module in model.modules():
        on = [name for name in OWN_SWITCHES if getattr(module, name, False) is True]
        if on:
            setattr(module, _SWITCHED_OFF, on)
        for name in on:
            setattr(module, name, False)


def _restore_own_checkpointing(model):
    for module in model.modules():
        for name in module.__dict__.pop(_SWITCHED_OFF, ()):
            setattr(module, name, True)


class _Checkpointed(Mixin):
    """What the mixins of this file have in common; the first of their options says whether dear results are kept."""


class _Unit(_Checkpointed):
    """A module whose forward is checkpointed whole."""

    def forward(self, *args, **kwargs):
        if not _records():
            return super().forward(*args, **kwargs)
        return _run([self], super().forward, args, kwargs, selective=options_of(self, _Unit)[0])


class _Chain(_Checkpointed):
    """A Sequential that checkpoints runs of its children."""

    def forward(self, input):
        if not _records():
            return super().forward(input)
        selective, spans = options_of(self, _Chain)
        layers = list(self)
        done = 0
        for start, stop in spans:
            input = _through(layers[done:start], input)
            span = layers[start:stop]
            input = _run(span, functools.partial(_through, span), (input,), {}, selective)
            done = stop
        return _through(layers[done:], input)


def _through(layers, input):
    for layer in layers:
        input = layer(input)
    return input


def _become(module, kind, *options):
    if not isinstance(module, _Checkpointed):  # a block used twice in one Sequential comes twice
        become(module, kind, *options)


class _State(threading.local):
    inside = False  # a checkpointed module is running: one shared with it must not checkpoint once more


_state = _State()


def _records():
    return torch.is_grad_enabled() and not _state.inside


@contextlib.contextmanager
def _inside():
    before, _state.inside = _state.inside, True
    try:
        yield
    finally:
        _state.inside = before


def _run(modules, function, args, kwargs, selective):
    # flat, so that tensors in lists and keywords count for the random state, and a list changed by forward is a copy
    leaves, structure = tree_flatten((args, kwargs))
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))

    def run(*leaves):
        args, kwargs = tree_unflatten(leaves, structure)
        return function(*args, **kwargs)

    return checkpoint(
        run, *leaves, use_reentrant=False, context_fn=functools.partial(_contexts, modules, device, selective)
    )


def _contexts(modules, device, selective):
    modules = [m for module in modules for m in module.modules()]
    common = [_inside, autocast_as_now(device)]
    if device.type == "cpu" and any(isinstance(m, nn.Conv2d) for m in modules):
        common.append(small_map_convolutions)
    statistics = functools.partial(_scratch_statistics, [m for m in modules if isinstance(m, _NormBase)])
    kept = {}
    keep, reuse = ([functools.partial(mode, kept)] if selective else [] for mode in (Keep, Reuse))
    return _Contexts(common + keep), _Contexts([*common, statistics, *reuse])


@contextlib.contextmanager
def _scratch_statistics(norms):
    """Within, running statistics are updated in copies, so that autograd sees as many tensors as the first time."""
    buffers = {norm: dict(norm._buffers) for norm in norms if norm.training}
    for norm, before in buffers.items():
        norm._buffers.update({name: None if b is None else b.clone() for name, b in before.items()})
    try:
        yield
    finally:
        for norm, before in buffers.items():
            norm._buffers.update(before)


class _Contexts:
    """Several contexts as one that can be entered again, as a second backward pass does."""

    def __init__(self, makers):
        self.makers = makers

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            for make in self.makers:
                stack.enter_context(make())
            self.stack = stack.pop_all()

    def __exit__(self, *error):
        return self.stack.__exit__(*error)
