"""LayerNorm over the channels of maps, alone and with a convolution behind or before it.

As in ConvNeXt (Liu et al. 2022, arXiv 2201.03545), whose stem and downsampling layers they are. Parameters are named
as in timm, whose weights load. Where a block does not run lean, see `lean_arch.blocks.norm_act`.

Shapes: x (B, C, H, W).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_arch.blocks.norm_act import FORWARDS, of_conv, renamed, runs_lean
from lean_arch.blocks.sizes import check_whole
from lean_arch.ops.layer_norm2d.convolution import convolve_norm, norm_convolve
from lean_arch.ops.layer_norm2d.op import layer_norm2d


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over channels; keeps its input alone. Parameters are nn.LayerNorm's; timm's LayerNorm2d is the same.

    Args:
        channels: C.
        eps: added to the variance.
        affine: whether there are weight and bias.
        kwargs: as nn.LayerNorm (bias, device, dtype).

    Raises ValueError for channels that are none, and for an input of others.
    """

    def __init__(self, channels: int, eps: float = 1e-6, affine: bool = True, **kwargs):
        check_whole(1, channels=channels)
        super().__init__(channels, eps, affine, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W), channels_last."""
        if torch.jit.is_scripting() or not self.runs_lean(x):
            return self.textbook(x)
        return self.lean(x)

    @torch.jit.unused
    def runs_lean(self, x: Tensor) -> bool:
        return runs_lean(x, self)

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        return layer_norm2d(x, self.weight, self.bias, self.eps)

    def textbook(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


FORWARDS.add(LayerNorm2d.forward)


class _Pair(nn.Sequential):
    """A norm and a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        if torch.jit.is_scripting() or not self.runs_lean(x):
            return self.textbook(x)
        return self.lean(x)

    textbook = renamed(nn.Sequential.forward, "textbook")


class NormConv2d(_Pair):
    """nn.Sequential(LayerNorm2d, nn.Conv2d), as ConvNeXt halves its maps; keeps its input alone."""

    @torch.jit.unused
    def runs_lean(self, x: Tensor) -> bool:
        return len(self) == 2 and isinstance(self[0], LayerNorm2d) and runs_lean(x, *self)

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        norm, conv = self
        return norm_convolve(x, norm.weight, norm.bias, norm.eps, *of_conv(conv))


class ConvNorm2d(_Pair):
    """nn.Sequential(nn.Conv2d, LayerNorm2d), ConvNeXt's stem; keeps its input alone, and convolves it twice.

    With its attribute `keep` = "convs" it convolves once, and keeps the convolution's result.
    """

    keep = "inputs"

    @torch.jit.unused
    def runs_lean(self, x: Tensor) -> bool:
        pays = len(self) == 2 and isinstance(self[1], LayerNorm2d) and self.keep != "convs"
        return pays and runs_lean(x, *self)

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        conv, norm = self
        return convolve_norm(x, *of_conv(conv), norm.weight, norm.bias, norm.eps)
