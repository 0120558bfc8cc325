"""Depthwise-separable blocks that keep the results of their convolutions, or their input alone, and compute the rest.

MobileNets (Howard et al. 2017, arXiv 1704.04861), MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381), squeeze-excite
(Hu et al. 2018, arXiv 1709.01507). Parts are named as in timm, whose weights load.

Shapes: x (B, C, H, W); wide, C * expansion channels.
"""

from numbers import Real

import torch
from torch import Tensor, nn

from lean_arch.blocks.norm_act import FORWARDS, KEEP, Chain, NormAct2d, activation, alternate, hooked, runs_lean
from lean_arch.blocks.sizes import check_share, check_whole


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016, arXiv 1603.09382): training zeroes whole images with probability `rate`."""

    def __init__(self, rate: float = 0.0):
        super().__init__()
        check_share(drop_path_rate=rate)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = 1 - self.rate
        return x * x.new_empty([x.shape[0]] + [1] * (x.dim() - 1)).bernoulli_(kept).div_(kept)


class SqueezeExcite(nn.Module):
    """Weighs channels by a small network of their means.

    Args:
        channels: C.
        reduced: channels of the hidden layer.
        act, gate: of the hidden layer, and nn.Sigmoid or nn.Hardsigmoid of the result.
    """

    def __init__(self, channels: int, reduced: int, act: str = "relu", gate: type[nn.Module] = nn.Sigmoid):
        super().__init__()
        check_whole(1, channels=channels, se_channels=reduced)
        self.conv_reduce, self.conv_expand = nn.Conv2d(channels, reduced, 1), nn.Conv2d(reduced, channels, 1)
        self.act1, self.gate = activation(act), gate()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return x * self.gate(self.conv_expand(self.act1(self.conv_reduce(x.mean((2, 3), keepdim=True)))))


FORWARDS.add(SqueezeExcite.forward)


def gate_of(se: nn.Module, pooled: Tensor) -> Tensor:
    """(B, C, 1, 1) -> (B, C, 1, 1)."""
    return se.gate(se.conv_expand(se.act1(se.conv_reduce(pooled))))


def conv2d(inputs: int, outputs: int, kernel_size=1, stride=1, dilation=1, groups=1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size, stride, dilation * (kernel_size // 2), dilation, groups, bias=False)


def check_odd(**kernel_sizes: int):
    """Raises ValueError for sizes of a kernel that has no middle."""
    check_whole(1, **kernel_sizes)
    for name, size in kernel_sizes.items():
        if size % 2 == 0:
            raise ValueError(f"{name} must be odd, got {size}")


def check_block(kernel_size: int, keep: str, **sizes: int):
    """Raises ValueError for what no block can be made of."""
    check_whole(1, **sizes)
    check_odd(kernel_size=kernel_size)
    if keep not in KEEP:
        raise ValueError(f"keep {keep!r} is unknown; {', '.join(KEEP)} are known")


def widened(channels: int, **ratio: float) -> int:
    """channels * ratio. Raises ValueError unless that is a whole number, 1 or more."""
    ((name, value),) = ratio.items()
    wide = channels * value if isinstance(value, Real) else 0
    if not 0.5 < wide < 2**31 or abs(round(wide) - wide) > 1e-6:
        raise ValueError(f"{name} {value!r} must give a whole number of channels, 1 or more, of {channels}")
    return round(wide)


class SyncNormAct(nn.SyncBatchNorm):
    """What nn.SyncBatchNorm.convert_sync_batchnorm makes of a NormAct2d in a block: its activation stays with it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Synchronizable(nn.Module):
    """A module whose NormAct2d keep their activations when they are converted."""

    def add_module(self, name: str, module: nn.Module):
        if type(module) is nn.SyncBatchNorm and hasattr(module, "act"):
            module.__class__ = SyncNormAct
        super().add_module(name, module)


class Block(Synchronizable):
    """A chain of convolutions and norms, and a shortcut where input and output are alike."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        if torch.jit.is_scripting() or not self.runs_lean(x):
            return self.textbook(x)
        y = self.lean(x)
        return self.drop_path(y) + x if self.has_skip else y

    @torch.jit.unused
    def runs_lean(self, x: Tensor) -> bool:
        se = self.se
        excites = isinstance(se, nn.Identity) or (type(se).forward in FORWARDS and not hooked(se))
        parts = self.chained()
        return runs_lean(x, *parts) and alternate(parts) and excites

    def chained(self) -> list[nn.Module]:
        """Its convolutions and norms, in order."""
        parts = [part for name, part in self.named_children() if name not in ("se", "drop_path")]
        return [part for part in parts if not isinstance(part, nn.Identity)]

    def excited(self, chain: Chain, z: Tensor, norm: nn.BatchNorm2d, conv: nn.Conv2d) -> Tensor:
        """norm, activation, squeeze-excite if there is one, and the 1x1 convolution behind."""
        has_se = not isinstance(self.se, nn.Identity)
        a = chain.norm(z, norm, pool=has_se)
        return chain.conv(a, conv, gate_of(self.se, a.pooled) if has_se else None)

    def extra_repr(self) -> str:
        return f"keep={self.keep!r}"


class SeparableConv2d(Block):
    """Depthwise convolution, norm, activation; 1x1 convolution, norm and, with `pointwise_act`, activation.

    Args:
        in_channels, out_channels: C, C'.
        kernel_size, stride, dilation: of the depthwise convolution; padded to keep the size at stride 1.
        act: of `NormAct2d`.
        pointwise_act: whether the second norm has an activation too (MobileNetV1).
        skip: add the input where the shapes agree.
        se_channels: hidden channels of a squeeze-excite between the two; None: none.
        drop_path_rate: of stochastic depth; ignored, as in timm, where there is no shortcut.
        keep: of its convolutions' results, "convs" keeps all, "dear" all but the first where they cost at most
            32 products a number, "inputs" the last alone; the block's input is kept too.

    Raises ValueError for sizes, rates and names that do not exist.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        dilation: int = 1,
        act: str = "relu",
        pointwise_act: bool = True,
        skip: bool = False,
        se_channels: int | None = None,
        drop_path_rate: float = 0.0,
        keep: str = "convs",
    ):
        super().__init__()
        check_block(
            kernel_size, keep, in_channels=in_channels, out_channels=out_channels, stride=stride, dilation=dilation
        )
        self.keep = keep
        self.has_skip = skip and stride == 1 and in_channels == out_channels
        self.conv_dw = conv2d(in_channels, in_channels, kernel_size, stride, dilation, in_channels)
        self.bn1 = NormAct2d(in_channels, act)
        self.se = SqueezeExcite(in_channels, se_channels, act) if se_channels is not None else nn.Identity()
        self.conv_pw = conv2d(in_channels, out_channels)
        self.bn2 = NormAct2d(out_channels, act if pointwise_act else "identity")
        self.drop_path = DropPath(drop_path_rate)

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        chain = Chain(self.keep)
        z = self.excited(chain, chain.conv(x, self.conv_dw), self.bn1, self.conv_pw)
        chain.end()
        return self.bn2(z)

    def textbook(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv_pw(self.se(self.bn1(self.conv_dw(x)))))
        return self.drop_path(y) + x if self.has_skip else y


class InvertedResidual(Block):
    """1x1 convolution to more channels, depthwise convolution, 1x1 convolution back, each with a norm; a shortcut.

    Args:
        in_channels, out_channels: C, C'.
        kernel_size, stride, dilation: of the depthwise convolution; padded to keep the size at stride 1.
        expansion: how many times C the middle is wide; C * expansion must be a whole number.
        act: of `NormAct2d`, after the first two norms.
        skip: add the input where the shapes agree.
        se_channels: hidden channels of a squeeze-excite before the last convolution; None: none.
        drop_path_rate: of stochastic depth; ignored, as in timm, where there is no shortcut.
        keep: of its convolutions' results, "convs" keeps all, "dear" all but the first where they cost at most
            32 products a number, "inputs" the last alone; the block's input is kept too.

    Raises ValueError for sizes, rates and names that do not exist.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        dilation: int = 1,
        expansion: float = 6,
        act: str = "relu6",
        skip: bool = True,
        se_channels: int | None = None,
        drop_path_rate: float = 0.0,
        keep: str = "convs",
    ):
        super().__init__()
        check_block(
            kernel_size, keep, in_channels=in_channels, out_channels=out_channels, stride=stride, dilation=dilation
        )
        wide = widened(in_channels, expansion=expansion)
        self.keep = keep
        self.has_skip = skip and stride == 1 and in_channels == out_channels
        self.conv_pw = conv2d(in_channels, wide)
        self.bn1 = NormAct2d(wide, act)
        self.conv_dw = conv2d(wide, wide, kernel_size, stride, dilation, wide)
        self.bn2 = NormAct2d(wide, act)
        self.se = SqueezeExcite(wide, se_channels, act) if se_channels is not None else nn.Identity()
        self.conv_pwl = conv2d(wide, out_channels)
        self.bn3 = NormAct2d(out_channels, "identity")
        self.drop_path = DropPath(drop_path_rate)

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        chain = Chain(self.keep)
        z = chain.conv(chain.norm(chain.conv(x, self.conv_pw), self.bn1), self.conv_dw)
        z = self.excited(chain, z, self.bn2, self.conv_pwl)
        chain.end()
        return self.bn3(z)

    def textbook(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv_dw(self.bn1(self.conv_pw(x))))
        y = self.bn3(self.conv_pwl(self.se(y)))
        return self.drop_path(y) + x if self.has_skip else y
