"""MobileNetV4's universal inverted bottleneck, whose depthwise convolutions may stand at the start, middle and end.

MobileNetV4 (Qin et al. 2024, arXiv 2404.10518). Parts are named as in timm, whose weights load.

Shapes: x (B, C, H, W); wide, C * expansion channels.
"""

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn

from lean_arch.blocks.norm_act import Chain, NormAct2d, hooked
from lean_arch.blocks.separable import (
    Block,
    DropPath,
    SqueezeExcite,
    Synchronizable,
    check_block,
    check_odd,
    conv2d,
    widened,
)


class ConvNorm(Synchronizable, nn.Sequential):
    """Convolution, norm and activation, for the block around them to chain."""

    def __init__(self, conv: nn.Conv2d, act: str = "identity"):
        super().__init__(OrderedDict(conv=conv, bn=NormAct2d(conv.out_channels, act)))


class UniversalInvertedResidual(Block):
    """An inverted residual with a depthwise convolution, or none, before, between and behind its two 1x1 convolutions.

    Each has a norm; those of the middle's wide channels have an activation. The stride is that of the middle depthwise
    convolution, of the first without one, and of the last where it is alone.

    Args:
        in_channels, out_channels: C, C'.
        start_kernel_size, kernel_size, end_kernel_size: of the depthwise convolutions; 0: none.
        stride: above 1 only with a depthwise convolution.
        expansion: how many times C the middle is wide; C * expansion must be a whole number.
        act: of `NormAct2d`.
        skip: add the input where the shapes agree.
        se_channels: hidden channels of a squeeze-excite before the last 1x1 convolution; None: none.
        drop_path_rate: of stochastic depth; ignored, as in timm, where there is no shortcut.
        keep: as of `InvertedResidual`.

    Raises ValueError for sizes, rates and names that do not exist.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        start_kernel_size: int = 0,
        kernel_size: int = 3,
        end_kernel_size: int = 0,
        stride: int = 1,
        expansion: float = 4,
        act: str = "relu",
        skip: bool = True,
        se_channels: int | None = None,
        drop_path_rate: float = 0.0,
        keep: str = "convs",
    ):
        super().__init__()
        check_block(kernel_size or 1, keep, in_channels=in_channels, out_channels=out_channels, stride=stride)
        check_odd(start_kernel_size=start_kernel_size or 1, end_kernel_size=end_kernel_size or 1)
        if stride > 1 and not (start_kernel_size or kernel_size or end_kernel_size):
            raise ValueError(f"stride {stride} needs a depthwise convolution, but all three kernel sizes are 0")
        wide = widened(in_channels, expansion=expansion)
        self.keep = keep
        self.has_skip = skip and stride == 1 and in_channels == out_channels
        strides = 1 if kernel_size else stride, stride, 1 if start_kernel_size or kernel_size else stride

        def depthwise(channels: int, kernel_size: int, stride: int, act: str = "identity") -> nn.Module:
            if not kernel_size:
                return nn.Identity()
            return ConvNorm(conv2d(channels, channels, kernel_size, stride, groups=channels), act)

        self.dw_start = depthwise(in_channels, start_kernel_size, strides[0])
        self.pw_exp = ConvNorm(conv2d(in_channels, wide), act)
        self.dw_mid = depthwise(wide, kernel_size, strides[1], act)
        self.se = SqueezeExcite(wide, se_channels, act) if se_channels is not None else nn.Identity()
        self.pw_proj = ConvNorm(conv2d(wide, out_channels))
        self.dw_end = depthwise(out_channels, end_kernel_size, strides[2])
        self.drop_path = DropPath(drop_path_rate)

    @torch.jit.unused
    def runs_lean(self, x: Tensor) -> bool:
        return not any(map(hooked, self._units())) and super().runs_lean(x)

    def chained(self) -> list[nn.Module]:
        parts = [part for unit in self._units() for part in unit.children()]
        return [part for part in parts if not isinstance(part, nn.Identity)]

    def _units(self) -> list[nn.Module]:
        """What may be a convolution and its norm, and may be nothing."""
        return [self.dw_start, self.pw_exp, self.dw_mid, self.pw_proj, self.dw_end]

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        chain = Chain(self.keep)
        units = [unit for unit in self._units() if not isinstance(unit, nn.Identity)]
        z = chain.conv(x, units[0].conv)
        for unit, following in pairwise(units):
            if following is self.pw_proj:
                z = self.excited(chain, z, unit.bn, following.conv)
            else:
                z = chain.conv(chain.norm(z, unit.bn), following.conv)
        chain.end()
        return units[-1].bn(z)

    def textbook(self, x: Tensor) -> Tensor:
        y = self.dw_end(self.pw_proj(self.se(self.dw_mid(self.pw_exp(self.dw_start(x))))))
        return self.drop_path(y) + x if self.has_skip else y
