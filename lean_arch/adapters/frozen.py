"""Layers of a model whose weights are frozen keep less for the backward pass; from outside, in place, and back.

After Bhatia and Dangel, "Lowering PyTorch's Memory Consumption for Selective Differentiation", 2024 (arXiv 2404.12406).
Each layer stays the same object, of a subclass of its class. What it does is settled at every call: a weight that
requires a gradient just then, no gradients at all, tracing, torch.compile and torch.func have PyTorch's own forward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_arch.ops.frozen.batch_norm import frozen_batch_norm
from lean_arch.ops.frozen.convolution import frozen_conv
from lean_arch.ops.frozen.piecewise import frozen_hardtanh, frozen_leaky_relu, frozen_relu
from lean_arch.ops.subclass import Mixin, become, revert

ACTIVATIONS = ("exact",)


def lean_frozen(model: nn.Module, activations: str = "exact") -> nn.Module:
    """Makes the frozen layers of `model` keep less for the backward pass, in place. Returns `model`.

    Raises ValueError where `activations` is unknown; the model is then as it was.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations {activations!r} is unknown: use one of {', '.join(ACTIVATIONS)}")
    restore_frozen(model)
    for module in model.modules():
        mixin = _mixin_for(module)
        if mixin is not None and "adapters" not in module._modules and "forward" not in module.__dict__:
            become(module, mixin)
    return model


def restore_frozen(model: nn.Module) -> nn.Module:
    """Undoes `lean_frozen`, in place. Returns `model`."""
    for module in model.modules():
        revert(module, Lean)
    return model


class Lean(Mixin):
    """What the mixins of this file have in common."""

    def __prepare_scriptable__(self):
        """For torch.jit.script: the layer as it would be without the mixin."""
        plain = self.__dict__.get("_plain") or type(self)._plain_class
        other = plain.__new__(plain)
        other.__dict__ = self.__dict__.copy()
        return other


def _saves(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> bool:
    """Whether autograd will keep anything of a layer's input x that its frozen weight is no reason to keep."""
    if not torch.is_grad_enabled() or torch.jit.is_tracing() or torch.compiler.is_compiling():
        return False
    if not isinstance(x, Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    if weight is not None and weight.requires_grad:
        return False
    return x.requires_grad or (bias is not None and bias.requires_grad)


class LeanConv(Lean):
    def _conv_forward(self, x, weight, bias):
        if not _saves(x, weight, bias):
            return super()._conv_forward(x, weight, bias)
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        return frozen_conv(x, weight, bias, self.stride, padding, self.dilation, self.groups)


class LeanBatchNorm(Lean):
    def forward(self, x):
        if self.training or self.running_mean is None or not _saves(x, self.weight, self.bias):
            return super().forward(x)
        self._check_input_dim(x)
        return frozen_batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.eps)


class LeanReLU(Lean):
    def forward(self, x):
        return frozen_relu(x, self.inplace) if _saves(x) else super().forward(x)


class LeanHardtanh(Lean):
    def forward(self, x):
        if not _saves(x):
            return super().forward(x)
        return frozen_hardtanh(x, self.min_val, self.max_val, self.inplace)


class LeanLeakyReLU(Lean):
    def forward(self, x):
        return frozen_leaky_relu(x, self.negative_slope, self.inplace) if _saves(x) else super().forward(x)


# by the function that the layer's class takes its forward from: a subclass with one of its own is left alone
MIXINS = {
    "torch.nn.modules.batchnorm._BatchNorm.forward": LeanBatchNorm,
    "torch.nn.modules.activation.ReLU.forward": LeanReLU,
    "torch.nn.modules.activation.Hardtanh.forward": LeanHardtanh,
    "torch.nn.modules.activation.LeakyReLU.forward": LeanLeakyReLU,
}
CONVS = nn.Conv1d, nn.Conv2d, nn.Conv3d


def _mixin_for(module: nn.Module) -> type[Lean] | None:
    for conv in CONVS:
        if isinstance(module, conv) and type(module)._conv_forward is conv._conv_forward:
            return LeanConv
    forward = type(module).forward
    return MIXINS.get(f"{forward.__module__}.{forward.__qualname__}")
