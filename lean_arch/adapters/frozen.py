"""Layers of a model whose weights are frozen keep less for the backward pass; from outside, in place, and back.

After Bhatia and Dangel, "Lowering PyTorch's Memory Consumption for Selective Differentiation", 2024 (arXiv 2404.12406).
Each layer stays the same object, of a subclass of its class. What it does is settled at every call: a weight that
requires a gradient just then, no gradients at all, tracing, torch.compile, torch.func and tensors of other classes
have the layer's own forward.

Shapes: x is whatever a layer takes, images (B, C, H, W), tokens (B, N, C).
"""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from lean_arch.blocks.norm_act import settings_of
from lean_arch.ops.frozen.batch_norm import compressed_batch_norm, frozen_batch_norm
from lean_arch.ops.frozen.convolution import CONVOLUTIONS, frozen_conv
from lean_arch.ops.frozen.dropout import packed_dropout
from lean_arch.ops.frozen.linear import frozen_linear
from lean_arch.ops.frozen.norm import frozen_group_norm, frozen_layer_norm, frozen_layer_norm2d, frozen_rms_norm
from lean_arch.ops.frozen.piecewise import frozen_hardtanh, frozen_leaky_relu, frozen_relu
from lean_arch.ops.frozen.pool import frozen_avg_pool2d, frozen_max_pool2d
from lean_arch.ops.frozen.smooth import frozen_activation
from lean_arch.ops.subclass import Mixin, become, options_of, revert

BITS = {"exact": None, "compressed": 8, "compressed:4": 4, "compressed:2": 2}


def lean_frozen(model: nn.Module, activations: str = "exact") -> nn.Module:
    """Makes the layers of `model` keep less for the backward pass, in place, where their weights are frozen.

    Results are the same to the bit. What layers keep of an input, for "exact" and for "compressed":

    - Convolutions nothing. Linear layers have nothing of theirs to begin with; under autocast no copy of the weight.
    - BatchNorm in eval() nothing; in train() its input, or 8 bits a number.
    - LayerNorm, GroupNorm and RMSNorm their input, in its own dtype, or 8 bits a number.
    - ReLU, ReLU6, Hardtanh and LeakyReLU 1 bit; MaxPool2d 8 bits a result, AvgPool2d nothing; Dropout 1 bit.
    - GELU, SiLU, Hardswish, Mish, Tanh and Sigmoid their input, or 8 bits a number.

    Gradients by "exact" differ by rounding at most. Those by "compressed" are off by 0.2% of their norm for an
    activation of normal numbers, 0.04% for a norm. "compressed:4" and "compressed:2" keep the slopes of smooth
    activations in 4 or 2 bits, which are off by 3% and 13%; norms keep 8 bits.

    Norms and activations of timm, torchvision and transformers are known by name, an RMSNorm by what it makes of random
    numbers. Left alone are layers that adapters changed (those with a child `adapters`), other norms and activations
    with a forward of their own such as timm's GroupNormAct, transposed convolutions, and what is called without a
    module (F.gelu, attention, the products of gates).

    Returns `model`. Raises ValueError where `activations` is unknown; the model is then as it was.
    """
    if activations not in BITS:
        raise ValueError(f"activations {activations!r} is unknown: use one of {', '.join(BITS)}")
    restore_frozen(model)
    for module in model.modules():
        if "adapters" in module._modules or "forward" in module.__dict__:
            continue
        mixin, *options = _mixin_for(module)
        if mixin is not None:
            become(module, mixin, BITS[activations], *options)
    return model


def restore_frozen(model: nn.Module) -> nn.Module:
    """Undoes `lean_frozen`, in place. Returns `model`."""
    for module in model.modules():
        revert(module, Lean)
    return model


class Lean(Mixin):
    """A layer whose forward keeps less. Its options begin with the bits for slopes, None for "exact"."""

    def forward(self, *args, **kwargs):
        plain = super().forward
        if len(args) != 1 or kwargs or not keeps(*args, self) or not self.gains(*args):
            return plain(*args, **kwargs)
        return self.lean(*args, plain)

    def gains(self, x: Tensor) -> bool:
        """Whether `lean` keeps less than the layer's own forward."""
        return True

    def lean(self, x: Tensor, plain) -> Tensor:
        """The same as plain(x)."""
        raise NotImplementedError

    @property
    def bits(self) -> int | None:
        return options_of(self, Lean)[0]

    def __prepare_scriptable__(self):
        """The layer as it was, which torch.jit.script compiles and leaves in the model."""
        other = nn.Module()
        other.__dict__ = self.__dict__.copy()
        other.__class__ = type(self)
        revert(other, Mixin)
        return other


def keeps(x: Tensor, layer: nn.Module) -> bool:
    """Whether autograd will keep anything for the gradients of x and of the bias, and the weight is frozen."""
    if not torch.is_grad_enabled() or torch.jit.is_tracing() or torch.compiler.is_compiling():
        return False
    if type(x) not in (Tensor, nn.Parameter, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if x.numel() == 0 or (weight is not None and weight.requires_grad):
        return False
    return x.requires_grad or (bias is not None and bias.requires_grad)


class LeanConv(Lean):
    """Any convolution: its own forward pads, scales or standardises, and what it calls in the end is replaced."""

    def lean(self, x, plain):
        with _FrozenConvolutions():
            return plain(x)


class _FrozenConvolutions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in CONVOLUTIONS.values():
            return self.convolve(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def convolve(self, func, input, weight, *args, **kwargs):
        return (
            func(input, weight, *args, **kwargs)
            if weight.requires_grad
            else frozen_conv(input, weight, *args, **kwargs)
        )


class LeanLinear(Lean):
    def gains(self, x):
        kind = x.device.type
        return torch.is_autocast_enabled(kind) and self.weight.dtype not in (
            torch.get_autocast_dtype(kind),
            torch.double,
        )

    def lean(self, x, plain):
        return frozen_linear(x, self.weight, self.bias)


class LeanBatchNorm(Lean):
    def gains(self, x):
        if not self.training and self.running_mean is not None:
            return True
        return self.bits is not None and x.dim() > 2 and x.numel() > x.shape[1]

    def lean(self, x, plain):
        self._check_input_dim(x)
        mean, var, batch, momentum, eps, _ = settings_of(self)
        if batch:
            return compressed_batch_norm(x, mean, var, self.weight, self.bias, momentum, eps)
        return frozen_batch_norm(x, mean, var, self.weight, self.bias, eps)


class LeanBatchNormAct(LeanBatchNorm):
    """timm's, which calls its parts `drop` and `act` behind the norm."""

    def lean(self, x, plain):
        return self.act(self.drop(super().lean(x, plain)))


class LeanLayerNorm(Lean):
    def gains(self, x):
        copied = not x.is_cpu and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float32
        return not getattr(self, "_fast_norm", False) and (self.bits is not None or self.weight is None or copied)

    def lean(self, x, plain):
        shape = self.normalized_shape
        return frozen_layer_norm(x, shape, self.weight, self.bias, self.eps, self.bits is not None, plain)


class LeanLayerNorm2d(LeanLayerNorm):
    def lean(self, x, plain):
        return frozen_layer_norm2d(x, self.weight, self.bias, self.eps, self.bits is not None, plain)


class LeanGroupNorm(LeanLayerNorm):
    def gains(self, x):
        # a result that is kept must not be written over, as activations behind a GroupNorm do
        return (self.weight is not None or self.bits is not None) and super().gains(x)

    def lean(self, x, plain):
        return frozen_group_norm(x, self.num_groups, self.weight, self.bias, self.eps, self.bits is not None, plain)


class LeanRMSNorm(Lean):
    """Its further options: eps, and what the weight is counted from."""

    def lean(self, x, plain):
        _, eps, offset = options_of(self, Lean)
        return frozen_rms_norm(x, self.weight.shape, self.weight + offset, eps, self.bits is not None, plain)


class LeanReLU(Lean):
    def lean(self, x, plain):
        return frozen_relu(x, self.inplace)


class LeanHardtanh(Lean):
    def lean(self, x, plain):
        return frozen_hardtanh(x, self.min_val, self.max_val, self.inplace)


class LeanLeakyReLU(Lean):
    def lean(self, x, plain):
        return frozen_leaky_relu(x, self.negative_slope, self.inplace)


class LeanActivation(Lean):
    """Its further options: the name, and whether PyTorch has several operators for it, which keep more than x."""

    def gains(self, x):
        return self.bits is not None or (options_of(self, Lean)[2] and not getattr(self, "inplace", False))

    def lean(self, x, plain):
        return frozen_activation(x, options_of(self, Lean)[1], self.bits, plain)


class LeanMaxPool2d(Lean):
    def gains(self, x):
        size = self.kernel_size if isinstance(self.kernel_size, tuple) else (self.kernel_size,) * 2
        return not self.return_indices and size[0] * size[1] <= 256

    def lean(self, x, plain):
        return frozen_max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class LeanAvgPool2d(Lean):
    def lean(self, x, plain):
        ends = self.ceil_mode, self.count_include_pad, self.divisor_override
        return frozen_avg_pool2d(x, self.kernel_size, self.stride, self.padding, *ends)


class LeanDropout(Lean):
    def gains(self, x):
        return self.training and 0 < self.p < 1 and not self.inplace

    def lean(self, x, plain):
        return packed_dropout(x, self.p)


# by the class from which a layer has its forward: a subclass with a forward of its own is left alone
MIXINS = {
    "torch.nn.modules.linear.Linear": (LeanLinear,),
    "torch.nn.modules.batchnorm._BatchNorm": (LeanBatchNorm,),
    "torch.nn.modules.normalization.LayerNorm": (LeanLayerNorm,),
    "torch.nn.modules.normalization.GroupNorm": (LeanGroupNorm,),
    "torch.nn.modules.activation.ReLU": (LeanReLU,),
    "torch.nn.modules.activation.Hardtanh": (LeanHardtanh,),
    "torch.nn.modules.activation.LeakyReLU": (LeanLeakyReLU,),
    "torch.nn.modules.activation.SiLU": (LeanActivation, "silu", False),
    "torch.nn.modules.activation.Mish": (LeanActivation, "mish", False),
    "torch.nn.modules.activation.Hardswish": (LeanActivation, "hardswish", False),
    "torch.nn.modules.activation.Tanh": (LeanActivation, "tanh", False),
    "torch.nn.modules.activation.Sigmoid": (LeanActivation, "sigmoid", False),
    "torch.nn.modules.pooling.MaxPool2d": (LeanMaxPool2d,),
    "torch.nn.modules.pooling.AvgPool2d": (LeanAvgPool2d,),
    "torch.nn.modules.dropout.Dropout": (LeanDropout,),
    "timm.layers.norm_act.BatchNormAct2d": (LeanBatchNormAct,),
    "timm.layers.norm.LayerNorm": (LeanLayerNorm,),
    "timm.layers.norm.LayerNorm2d": (LeanLayerNorm2d,),
    "timm.layers.norm.GroupNorm": (LeanGroupNorm,),
    "timm.layers.norm.GroupNorm1": (LeanGroupNorm,),
    "timm.layers.activations.GELU": (LeanActivation, "gelu", False),
    "timm.layers.activations.GELUTanh": (LeanActivation, "gelu_tanh", False),
    "timm.layers.activations.QuickGELU": (LeanActivation, "quick_gelu", True),
    "timm.layers.activations.Swish": (LeanActivation, "silu", True),
    "timm.layers.activations.Mish": (LeanActivation, "mish", True),
    "timm.layers.activations.HardSwish": (LeanActivation, "hardswish", True),
    "timm.layers.activations.Sigmoid": (LeanActivation, "sigmoid", False),
    "timm.layers.activations.Tanh": (LeanActivation, "tanh", False),
    "torchvision.models.convnext.LayerNorm2d": (LeanLayerNorm2d,),
    "transformers.activations.GELUActivation": (LeanActivation, "gelu", True),
    "transformers.activations.GELUTanh": (LeanActivation, "gelu_tanh", True),
    "transformers.activations.NewGELUActivation": (LeanActivation, "gelu_tanh", True),
    "transformers.activations.FastGELUActivation": (LeanActivation, "gelu_tanh", True),
    "transformers.activations.AccurateGELUActivation": (LeanActivation, "gelu_tanh", True),
    "transformers.activations.QuickGELUActivation": (LeanActivation, "quick_gelu", True),
    "transformers.activations.SiLUActivation": (LeanActivation, "silu", False),
    "transformers.activations.MishActivation": (LeanActivation, "mish", False),
}


def _mixin_for(module: nn.Module) -> tuple:
    """(mixin, its options after the first), or (None,)."""
    forward = type(module).forward
    home = f"{forward.__module__}.{forward.__qualname__.removesuffix('.forward')}"
    if home == "torch.nn.modules.activation.GELU":
        return LeanActivation, {"none": "gelu", "tanh": "gelu_tanh"}[module.approximate], False
    if isinstance(module, nn.LayerNorm) and home.startswith("transformers.models.") and hasattr(module, "data_format"):
        return (LeanLayerNorm2d if module.data_format == "channels_first" else LeanLayerNorm,)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return (LeanConv,)
    return MIXINS.get(home) or _rms_norm(module, forward)


def _rms_norm(module: nn.Module, forward) -> tuple:
    """Of the many RMSNorms that models bring along, those that make of random numbers what F.rms_norm makes of them."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = "rmsnorm" in type(module).__name__.lower() or hasattr(module, "variance_epsilon")
    weight = getattr(module, "weight", None)
    if not named or not isinstance(eps, float | None) or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return (None,)
    alone = len(list(module.parameters())) == 1 and not list(module.children()) and not list(module.buffers())
    needed = [p for p in inspect.signature(forward).parameters.values() if p.default is p.empty]
    if not alone or len(needed) != 2 or weight.is_meta or type(weight.data) is not Tensor:
        return (None,)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, len(weight), generator=generator) * torch.tensor([[1.0], [1e-3], [30.0]])
    x = x.to(weight)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        got = forward(module, x)
        for offset in (0.0, 1.0):
            want = F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps)
            if isinstance(got, Tensor) and got.shape == x.shape and (got - want).norm() < 0.01 * want.norm():
                return LeanRMSNorm, eps, offset
    return (None,)
