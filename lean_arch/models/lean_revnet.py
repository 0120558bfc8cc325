"""Reversible ResNet of depthwise-separable convolutions: training memory does not grow with a stage's depth.

Papers: The Reversible Residual Network (Gomez et al. 2017, arXiv 1707.04585), whose residual functions are here
inverted residuals without a shortcut (MobileNetV2, Sandler et al. 2018, arXiv 1801.04381). Within a stage, half the
channels are one residual stream and half the other; backward rebuilds them exactly instead of keeping activations.

Shapes: B images of H x W pixels, C channels of a stage: maps (B, C, H', W'), streams (B, C / 2, H', W').
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, register_notrace_module
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from lean_arch.blocks import InvertedResidual, NormAct2d, ReversibleSequence
from lean_arch.blocks.separable import DropPath
from lean_arch.blocks.sizes import check_share, check_whole

__all__ = ["LeanRevNet"]

register_notrace_module(NormAct2d)  # BatchNorm looks at its input's shape, which torch.fx does not know

STAGES = 4
EXPANSION = 4


class RevStage(nn.Module):
    """Norm, activation and a 2x2 convolution of stride 2 into both streams; one reversible pair for each drop rate.

    Both functions of a pair end in BatchNorm, which keeps the streams far within what ReversibleSequence carries.
    """

    def __init__(self, in_channels: int, channels: int, drop_path_rates: Sequence[float], act: str):
        super().__init__()
        self.downsample = nn.Sequential(NormAct2d(in_channels, act), nn.Conv2d(in_channels, channels, 2, 2, bias=False))
        width = channels // 2
        self.blocks = ReversibleSequence([_residual(width, r, act), _residual(width, r, act)] for r in drop_path_rates)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H // 2, W // 2)"""
        x1, x2 = self.downsample(x).chunk(2, 1)
        y1, y2 = self.blocks((x1, x2))
        return torch.cat((y1, y2), 1)


def _residual(width: int, drop_path_rate: float, act: str) -> nn.Sequential:
    block = InvertedResidual(width, width, expansion=EXPANSION, act=act, skip=False)
    nn.init.zeros_(block.bn3.weight)  # a stage begins as the identity, which trains faster
    return nn.Sequential(block, DropPath(drop_path_rate))  # the shortcut is the stack's, and so is what to drop


class LeanRevNet(nn.Module):
    """A convolution of stride 2, four reversible stages that each halve the map, and timm's classifier.

    Args:
        depths: pairs of residual functions in each of the four stages.
        widths: channels of each stage, even: one half for each stream. The stem has half the first.
        in_chans, num_classes, global_pool, drop_rate: as timm's models; drop_rate is the classifier's dropout.
        drop_path_rate: of stochastic depth in the last pair; rises evenly from 0 in the first.
        act: of `NormAct2d`.
        device, dtype: of the parameters; None: torch's defaults.

    Raises ValueError for sizes, rates and names that do not exist.
    """

    def __init__(
        self,
        depths: Sequence[int] = (2, 2, 6, 2),
        widths: Sequence[int] = (64, 128, 256, 512),
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        act: str = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_stages(depths=depths, widths=widths)
        for width in widths:
            if width % 2:
                raise ValueError(f"widths {tuple(widths)} must be even, as each stage has two streams; {width} is odd")
        check_whole(1, in_chans=in_chans)
        check_whole(0, num_classes=num_classes)
        check_share(drop_rate=drop_rate, drop_path_rate=drop_path_rate)

        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = widths[-1]
        pairs = sum(depths)
        rates = [drop_path_rate * i / max(pairs - 1, 1) for i in range(pairs)]
        channels = widths[0] // 2
        self.stem = nn.Conv2d(in_chans, channels, 3, 2, 1, bias=False)  # its norm is the first stage's
        stages, self.feature_info = [], []
        for index, (depth, width) in enumerate(zip(depths, widths)):
            stages.append(RevStage(channels, width, rates[:depth], act))
            self.feature_info.append({"num_chs": width, "reduction": 4 * 2**index, "module": f"stages.{index}"})
            channels, rates = width, rates[depth:]
        self.stages = nn.Sequential(*stages)
        self.norm = NormAct2d(self.num_features, act)
        self.head = ClassifierHead(self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate)
        self.head_hidden_size = self.head.num_features
        self.to(device=device, dtype=dtype)

    @torch.jit.ignore
    def set_reversible(self, enabled: bool) -> None:
        """False: the same mathematics with activations stored; True (the default): rebuilt in backward."""
        for stage in self.stages:
            stage.blocks.reversible = enabled

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputing in backward is what the reversible stages do."""
        self.set_reversible(enable)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameters by layer, as timm's optimizers group them."""
        fine = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else fine}

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Another classifier, and another pooling unless None."""
        self.num_classes = num_classes
        weight = self.stem.weight
        self.head.reset(num_classes, pool_type=global_pool, device=weight.device, dtype=weight.dtype)
        self.head_hidden_size = self.head.num_features

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, C, H / 32, W / 32)"""
        return self.norm(self.stages(self.stem(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, C, H, W) -> (B, num_classes), or with `pre_logits` what the classifier is given."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, num_classes)"""
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps of the stages `indices` (the last n if an int, all if None), both streams as one, (B, C, H', W').

        `norm` is applied to the last stage's alone. Unless `intermediates_only`, the final features come first.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be NCHW, got {output_fmt!r}")
        if stop_early and not intermediates_only:
            raise ValueError("stop_early=True leaves no final features; it needs intermediates_only=True")
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        x, taken = self.stem(x), []
        for index, stage in enumerate(self.stages[: max_index + 1] if stop_early else self.stages):
            x = stage(x)
            if index in take_indices:
                taken.append(self.norm(x) if norm and index == STAGES - 1 else x)
        return taken if intermediates_only else (self.norm(x), taken)

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes what the intermediates `indices` do not need; returns which stages these are."""
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: max_index + 1]
        if prune_norm or max_index < STAGES - 1:  # the norm fits the last stage alone
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take_indices


def _check_stages(**sizes: Sequence[int]) -> None:
    """Raises ValueError unless each is a whole number, 1 or more, for each of the stages."""
    for name, values in sizes.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != STAGES:
            raise ValueError(f"{name} must be {STAGES} whole numbers, one a stage, got {values!r}")
        check_whole(1, **{f"{name}[{i}]": value for i, value in enumerate(values)})


default_cfgs = generate_default_cfgs(
    {
        "lean_revnet.untrained": {
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "pool_size": (7, 7),
            "crop_pct": 0.875,
            "interpolation": "bicubic",
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
            "first_conv": "stem",
            "classifier": "head.fc",
            "license": "apache-2.0",
            "paper_ids": "arXiv:1707.04585",
            "paper_name": "The Reversible Residual Network: Backpropagation Without Storing Activations",
        }
    }
)


@register_model
def lean_revnet(pretrained: bool = False, **kwargs) -> LeanRevNet:
    """Streams of 32 to 256 channels in four stages, 12 pairs of residual functions; 5.2M parameters."""
    out_indices = kwargs.pop("out_indices", (0, 1, 2, 3))
    return build_model_with_cfg(
        LeanRevNet,
        "lean_revnet",
        pretrained,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )
