"""timm's convolutional models made lean: the same parts and weights, in blocks that keep less for the backward pass.

A part stays the object it was, of a subclass of its class, as checkpointed modules do; so weights load either way,
and features, hooks and deepcopy work as in timm.
"""

import torch
from timm.layers import BatchNormAct2d, ConvMlp, LayerNorm
from timm.layers import LayerNorm2d as TimmLayerNorm2d
from timm.layers import Mlp as TimmMlp
from timm.layers.activations import GELU, HardSwish, Swish
from timm.models import _efficientnet_blocks as timm_blocks
from timm.models import convnext as timm_convnext
from timm.models.efficientnet import EfficientNet
from timm.models.mobilenetv3 import MobileNetV3
from torch import Tensor, nn

from lean_arch.blocks import ConvNeXtBlock, InvertedResidual, NormAct2d, SeparableConv2d, UniversalInvertedResidual
from lean_arch.blocks.layer_norm2d import ConvNorm2d, LayerNorm2d, NormConv2d
from lean_arch.blocks.norm_act import FORWARDS, KEEP, renamed
from lean_arch.models.lean_opening import LeanEfficientNet, LeanMobileNetV3
from lean_arch.ops.norm_act.activations import MODULES

MODULES.update({GELU: "gelu", HardSwish: "hardswish", Swish: "silu"})
FORWARDS.update(module.forward for module in (LayerNorm, TimmMlp, ConvMlp, timm_blocks.SqueezeExcite))


class LeanBatchNormAct2d(NormAct2d, BatchNormAct2d):
    textbook = renamed(BatchNormAct2d.forward, "textbook")


class LeanLayerNorm2d(LayerNorm2d, TimmLayerNorm2d):
    textbook = renamed(TimmLayerNorm2d.forward, "textbook")


class LeanInvertedResidual(InvertedResidual, timm_blocks.InvertedResidual):
    textbook = renamed(timm_blocks.InvertedResidual.forward, "textbook")


class LeanDepthwiseSeparableConv(SeparableConv2d, timm_blocks.DepthwiseSeparableConv):
    textbook = renamed(timm_blocks.DepthwiseSeparableConv.forward, "textbook")


class LeanUniversalInvertedResidual(UniversalInvertedResidual, timm_blocks.UniversalInvertedResidual):
    textbook = renamed(timm_blocks.UniversalInvertedResidual.forward, "textbook")

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        return self.layer_scale(super().lean(x))


class LeanConvNeXtBlock(ConvNeXtBlock, timm_convnext.ConvNeXtBlock):
    textbook = renamed(timm_convnext.ConvNeXtBlock.forward, "textbook")


LEAN = {  # a class, or those of a Sequential's parts
    timm_convnext.ConvNeXtBlock: LeanConvNeXtBlock,
    TimmLayerNorm2d: LeanLayerNorm2d,
    (TimmLayerNorm2d, nn.Conv2d): NormConv2d,
    (nn.Conv2d, TimmLayerNorm2d): ConvNorm2d,
    BatchNormAct2d: LeanBatchNormAct2d,
    timm_blocks.InvertedResidual: LeanInvertedResidual,
    timm_blocks.DepthwiseSeparableConv: LeanDepthwiseSeparableConv,
    timm_blocks.UniversalInvertedResidual: LeanUniversalInvertedResidual,
    EfficientNet: LeanEfficientNet,
    MobileNetV3: LeanMobileNetV3,
}


def make_lean(model: nn.Module, keep: str = "dear") -> nn.Module:
    """Changes the parts of a timm model in place, those that have a lean form; returns `model`.

    keep: "convs", "dear" or "inputs", as in `lean_arch.blocks.InvertedResidual`. Raises ValueError for another.
    """
    if keep not in KEEP:
        raise ValueError(f"keep {keep!r} is unknown; {', '.join(KEEP)} are known")
    for module in model.modules():
        lean = LEAN.get(tuple(map(type, module)) if type(module) is nn.Sequential else type(module))
        if lean is not None:
            module.__class__ = lean
            if lean not in (LeanBatchNormAct2d, LeanLayerNorm2d, NormConv2d):
                module.keep = keep
    return model
