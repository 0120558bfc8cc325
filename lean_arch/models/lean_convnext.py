"""ConvNeXts of timm's architectures and weights, whose blocks keep two of the twelve tensors a textbook block keeps.

A ConvNet for the 2020s (Liu et al. 2022, arXiv 2201.03545).

Shapes: x (B, 3, H, W), logits (B, num_classes).
"""

from timm.models import convnext, register_model
from torch import nn

from lean_arch.models.lean_conversion import make_lean

SIZES = "atto", "tiny", "small", "base"
default_cfgs = {f"lean_convnext_{size}": convnext.default_cfgs[f"convnext_{size}"] for size in SIZES}


@register_model
def lean_convnext_atto(pretrained: bool = False, keep: str = "dear", **kwargs) -> nn.Module:
    """3.7M parameters."""
    return make_lean(convnext.convnext_atto(pretrained, **kwargs), keep)


@register_model
def lean_convnext_tiny(pretrained: bool = False, keep: str = "dear", **kwargs) -> nn.Module:
    """29M parameters."""
    return make_lean(convnext.convnext_tiny(pretrained, **kwargs), keep)


@register_model
def lean_convnext_small(pretrained: bool = False, keep: str = "dear", **kwargs) -> nn.Module:
    """50M parameters."""
    return make_lean(convnext.convnext_small(pretrained, **kwargs), keep)


@register_model
def lean_convnext_base(pretrained: bool = False, keep: str = "dear", **kwargs) -> nn.Module:
    """89M parameters."""
    return make_lean(convnext.convnext_base(pretrained, **kwargs), keep)
