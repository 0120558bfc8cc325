"""EfficientNets of timm's architectures and weights, whose blocks keep the results of their convolutions and no more.

EfficientNet (Tan and Le 2019, arXiv 1905.11946).

Shapes: x (B, 3, H, W), logits (B, num_classes).
"""

from timm.models import efficientnet, register_model
from torch import nn

from lean_arch.models.lean_conversion import make_lean

default_cfgs = {f"lean_efficientnet_b{n}": efficientnet.default_cfgs[f"efficientnet_b{n}"] for n in range(5)}


@register_model
def lean_efficientnet_b0(pretrained: bool = False, keep: str = "dear", **kwargs) -> nn.Module:
    """5.3M parameters, made for images of 224 pixels."""
    return make_lean(efficientnet.efficientnet_b0(pretrained, **kwargs), keep)


@register_model
def lean_efficientnet_b1(pretrained: bool = False, keep: str = "dear", **kwargs) -> nn.Module:
    """7.8M parameters, 240 pixels."""
    return make_lean(efficientnet.efficientnet_b1(pretrained, **kwargs), keep)


@register_model
def lean_efficientnet_b2(pretrained: bool = False, keep: str = "dear", **kwargs) -> nn.Module:
    """9.1M parameters, 260 pixels."""
    return make_lean(efficientnet.efficientnet_b2(pretrained, **kwargs), keep)


@register_model
def lean_efficientnet_b3(pretrained: bool = False, keep: str = "dear", **kwargs) -> nn.Module:
    """12M parameters, 300 pixels."""
    return make_lean(efficientnet.efficientnet_b3(pretrained, **kwargs), keep)


@register_model
def lean_efficientnet_b4(pretrained: bool = False, keep: str = "dear", **kwargs) -> nn.Module:
    """19M parameters, 380 pixels."""
    return make_lean(efficientnet.efficientnet_b4(pretrained, **kwargs), keep)
