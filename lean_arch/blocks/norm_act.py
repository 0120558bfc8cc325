"""BatchNorm with an activation, and what blocks of convolutions share so that they keep BatchNorm's inputs alone.

A block runs lean where that is known to give the numbers of its textbook form; everywhere else (another norm or
activation, SyncBatchNorm, hooks on its parts, tracing, torch.compile, whose partitioner recomputes by itself) it runs
that form.

Shapes: x (B, C, H, W).
"""

from types import FunctionType

import torch
from torch import Tensor, nn

from lean_arch.blocks.sizes import check_whole
from lean_arch.ops.norm_act.activations import MODULES, name_of
from lean_arch.ops.norm_act.op import Activation, Settings, Source, activate, batch_norm_act, convolve
from lean_arch.ops.plain_convolution import Geometry

KEEP = "convs", "dear", "inputs"
CHEAP = 32  # products a number
# of the modules that have a lean form; a subclass whose forward is another has none
FORWARDS = {nn.Conv2d.forward, nn.BatchNorm2d.forward, nn.LayerNorm.forward, nn.Identity.forward}


def activation(name: str) -> nn.Module:
    """The module of an activation. Raises ValueError for a name that is none of "relu", "silu", ..."""
    modules = {known: module for module, known in reversed(MODULES.items())}
    if name not in modules:
        raise ValueError(f"act {name!r} is unknown; {', '.join(sorted(modules))} are known")
    return modules[name]()


def renamed(function: FunctionType, name: str) -> FunctionType:
    """The same function: TorchScript takes a method's own name, and a class can have but one `forward`."""
    return FunctionType(function.__code__, function.__globals__, name, function.__defaults__, function.__closure__)


class NormAct2d(nn.BatchNorm2d):
    """BatchNorm2d, then an activation; keeps its input alone. Parameters and buffers are nn.BatchNorm2d's.

    Args:
        channels: C.
        act: "identity", "relu", "relu6", "silu", "gelu" or "hardswish".
        kwargs: as nn.BatchNorm2d (eps, momentum, affine, track_running_stats).

    Raises ValueError for another act, for an input of other channels, and in training for one value a channel.
    """

    def __init__(self, channels: int, act: str = "relu", **kwargs):
        check_whole(1, channels=channels)
        super().__init__(channels, **kwargs)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        if torch.jit.is_scripting() or not self.runs_lean(x):
            return self.textbook(x)
        return self.lean(x)

    @torch.jit.unused
    def runs_lean(self, x: Tensor) -> bool:
        return runs_lean(x, self)

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        return batch_norm_act(x, self.weight, self.bias, settings_of(self))

    _norm = renamed(nn.BatchNorm2d.forward, "_norm")

    def textbook(self, x: Tensor) -> Tensor:
        return self.act(self._norm(x))


FORWARDS.add(NormAct2d.forward)


def runs_lean(x: Tensor, *modules: nn.Module) -> bool:
    """Whether the modules, convolutions and norms, are such that the lean form gives their numbers.

    With or without gradients: a reversible stack runs a block without, and again with them, and both must round alike.
    Raises ValueError where x is nothing that the first of them takes.
    """
    if torch.jit.is_tracing() or torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    _check_maps(x, modules[0])
    return x.numel() > 0 and all(map(_is_plain, modules))


def _check_maps(x: Tensor, first: nn.Module):
    if isinstance(first, nn.Conv2d):
        channels, mixes = first.in_channels, torch.is_autocast_enabled("cpu" if x.is_meta else x.device.type)
    elif isinstance(first, nn.BatchNorm2d):
        channels, mixes = first.num_features, True
    elif isinstance(first, nn.LayerNorm):
        channels, mixes = first.normalized_shape[0], True
    else:
        return
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(f"x must be (B, {channels}, H, W), got {tuple(x.shape)}")
    dtype = x.dtype if first.weight is None else first.weight.dtype
    alike = x.dtype == dtype or (mixes and torch.float64 not in (x.dtype, dtype))
    if not (alike and x.is_floating_point()):
        raise ValueError(f"x is {x.dtype}, but the weights are {dtype}; x.to({dtype}) works")


def hooked(module: nn.Module) -> bool:
    """Whether somebody listens to the module or to a part of it, or has put another forward in its place."""
    return any(
        m._forward_hooks
        or m._forward_pre_hooks
        or m._backward_hooks
        or m._backward_pre_hooks
        or "forward" in m.__dict__
        for m in module.modules()
    )


def alternate(modules: list[nn.Module]) -> bool:
    """Whether they are convolutions, each with a BatchNorm behind it."""
    convs, norms = modules[::2], modules[1::2]
    in_order = all(isinstance(m, nn.Conv2d) for m in convs) and all(isinstance(m, nn.BatchNorm2d) for m in norms)
    return in_order and len(convs) == len(norms)


def _is_plain(module: nn.Module) -> bool:
    if hooked(module) or type(module).forward not in FORWARDS:
        return False
    if isinstance(module, nn.BatchNorm2d):
        return _act_of(module) is not None and isinstance(getattr(module, "drop", None), nn.Identity | None)
    if isinstance(module, nn.LayerNorm):
        return not getattr(module, "_fast_norm", False)  # timm's, which rounds to autocast's dtype
    if isinstance(module, nn.Conv2d):
        return type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return True


def _act_of(norm: nn.BatchNorm2d) -> str | None:
    return name_of(norm.act) if hasattr(norm, "act") else "identity"


def settings_of(module: nn.BatchNorm2d) -> Settings:
    """How `module` would normalise now; its count of batches moves on as if it were called."""
    running, act = (module.running_mean, module.running_var), _act_of(module)
    if not module.training and module.running_mean is not None:
        return Settings(*running, False, 0.0, module.eps, act)
    momentum, tracked = module.momentum, module.training and module.track_running_stats
    if tracked and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        momentum = 1.0 / float(module.num_batches_tracked) if momentum is None else momentum
    return Settings(*(running if tracked else (None, None)), True, momentum or 0.0, module.eps, act)


def of_conv(conv: nn.Conv2d) -> tuple[Tensor, Tensor | None, Geometry]:
    return conv.weight, conv.bias, Geometry(conv.stride, conv.padding, conv.dilation, conv.groups)


class Chain:
    """Convolutions with norms between them, one pass; `keep` says what its backward pass finds and what it recomputes.

    "convs": the result of every convolution, so that none runs twice. "dear": as "convs", but of the first ones those
    that cost more than CHEAP products a number. "inputs": the last alone. The chain's input is kept in any case.
    """

    def __init__(self, keep: str):
        self.keep, self.sources = keep, []

    def conv(self, x: Tensor | Activation, conv: nn.Conv2d, gate: Tensor | None = None) -> Tensor:
        self.origin = x.recipe if isinstance(x, Activation) else x.detach(), *of_conv(conv), gate
        return convolve(x, *of_conv(conv), gate)

    def norm(self, z: Tensor, norm: nn.BatchNorm2d, pool: bool = False) -> Activation:
        """Of the result z of the last `conv`."""
        origin, weight = self.origin[:2]
        within_reach = isinstance(origin, Tensor) or origin.source is not None
        source = None
        if self.keep == "inputs" or (self.keep == "dear" and within_reach and weight[0].numel() <= CHEAP):
            source = Source(z, *self.origin)
            self.sources.append(source)
        return activate(z, norm.weight, norm.bias, settings_of(norm), pool, source)

    def end(self):
        for source in self.sources:
            source.drop()
