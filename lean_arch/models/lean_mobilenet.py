"""MobileNets of timm's architectures and weights, whose blocks keep the results of their convolutions and no more.

MobileNetV1 (Howard et al. 2017, arXiv 1704.04861), V2 (Sandler et al. 2018, arXiv 1801.04381), V3 (Howard et al. 2019,
arXiv 1905.02244), V4 (Qin et al. 2024, arXiv 2404.10518).

Shapes: x (B, 3, H, W), logits (B, num_classes).
"""

from timm.models import efficientnet, mobilenetv3, register_model
from torch import nn

from lean_arch.models.lean_conversion import make_lean

TWINS = {
    "lean_mobilenetv1": (efficientnet, "mobilenetv1_100"),
    "lean_mobilenetv2": (efficientnet, "mobilenetv2_100"),
    "lean_mobilenetv3_small": (mobilenetv3, "mobilenetv3_small_100"),
    "lean_mobilenetv3_large": (mobilenetv3, "mobilenetv3_large_100"),
    "lean_mobilenetv4_conv_small": (mobilenetv3, "mobilenetv4_conv_small"),
}
default_cfgs = {name: family.default_cfgs[twin] for name, (family, twin) in TWINS.items()}


def _create(name: str, pretrained: bool, keep: str = "dear", **kwargs) -> nn.Module:
    family, twin = TWINS[name]
    return make_lean(getattr(family, twin)(pretrained=pretrained, **kwargs), keep)


@register_model
def lean_mobilenetv1(pretrained: bool = False, **kwargs) -> nn.Module:
    """MobileNetV1: separable convolutions one after the other; 4.2M parameters."""
    return _create("lean_mobilenetv1", pretrained, **kwargs)


@register_model
def lean_mobilenetv2(pretrained: bool = False, **kwargs) -> nn.Module:
    """MobileNetV2: inverted residuals; 3.5M parameters."""
    return _create("lean_mobilenetv2", pretrained, **kwargs)


@register_model
def lean_mobilenetv3_small(pretrained: bool = False, **kwargs) -> nn.Module:
    """MobileNetV3 small: inverted residuals with squeeze-excite and hard swish; 2.5M parameters."""
    return _create("lean_mobilenetv3_small", pretrained, **kwargs)


@register_model
def lean_mobilenetv3_large(pretrained: bool = False, **kwargs) -> nn.Module:
    """MobileNetV3 large: 5.5M parameters."""
    return _create("lean_mobilenetv3_large", pretrained, **kwargs)


@register_model
def lean_mobilenetv4_conv_small(pretrained: bool = False, **kwargs) -> nn.Module:
    """MobileNetV4 small: convolutions, then universal inverted bottlenecks; 3.8M parameters."""
    return _create("lean_mobilenetv4_conv_small", pretrained, **kwargs)
