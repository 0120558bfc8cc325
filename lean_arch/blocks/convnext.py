"""The ConvNeXt block, which keeps its input and its depthwise convolution's result, and nothing four times as wide.

Liu et al. 2022, "A ConvNet for the 2020s" (arXiv 2201.03545). Parts are named as in timm, whose weights load.

Shapes: x (B, C, H, W).
"""

import torch
from torch import Tensor, nn

from lean_arch.blocks.norm_act import FORWARDS, hooked, of_conv, runs_lean
from lean_arch.blocks.separable import DropPath, check_block, widened
from lean_arch.ops.norm_act.activations import name_of
from lean_arch.ops.norm_act.op import convolve
from lean_arch.ops.norm_mlp import norm_mlp


class Mlp(nn.Module):
    """Linear, GELU, Linear."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        return self.fc2(self.act(self.fc1(x)))


FORWARDS.add(Mlp.forward)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution; LayerNorm, Linear, GELU, Linear over channels; LayerScale; the input added.

    Args:
        channels: C.
        kernel_size: odd, of the depthwise convolution, padded to keep the size.
        mlp_ratio: how many times C the hidden layer is wide.
        layer_scale: what LayerScale starts from; None: none.
        drop_path_rate: of stochastic depth.
        keep: "convs" keeps x, the depthwise convolution's result and the first linear layer's, and runs nothing twice;
            "dear" and "inputs" run that layer twice.

    Raises ValueError for sizes, rates and names that do not exist.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 7,
        mlp_ratio: float = 4,
        layer_scale: float | None = 1e-6,
        drop_path_rate: float = 0.0,
        keep: str = "inputs",
    ):
        super().__init__()
        check_block(kernel_size, keep, channels=channels)
        self.keep = keep
        self.conv_dw = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.mlp = Mlp(channels, widened(channels, mlp_ratio=mlp_ratio))
        self.gamma = None if layer_scale is None else nn.Parameter(torch.full((channels,), float(layer_scale)))
        self.shortcut, self.drop_path = nn.Identity(), DropPath(drop_path_rate)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        if torch.jit.is_scripting() or not self.runs_lean(x):
            return self.textbook(x)
        return self.drop_path(self.lean(x)) + self.shortcut(x)

    def textbook(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        y = y if self.gamma is None else y * self.gamma[:, None, None]
        return self.drop_path(y) + self.shortcut(x)

    @torch.jit.unused
    def runs_lean(self, x: Tensor) -> bool:
        norm = self.norm
        normalises = isinstance(norm, nn.LayerNorm) and norm.bias is not None
        return runs_lean(x, self.conv_dw, norm) and normalises and _is_plain(self.mlp)

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        z = convolve(x, *of_conv(self.conv_dw)).permute(0, 2, 3, 1)
        y = norm_mlp(
            z.reshape(-1, z.shape[-1]),
            self.norm.weight,
            self.norm.bias,
            self.mlp.fc1.weight.flatten(1),  # timm's small models have 1x1 convolutions instead
            self.mlp.fc1.bias,
            self.mlp.fc2.weight.flatten(1),
            self.mlp.fc2.bias,
            self.gamma,
            self.norm.eps,
            name_of(self.mlp.act),
            self.keep == "convs",
        )
        return y.view(z.shape).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"keep={self.keep!r}"


def _is_plain(mlp: nn.Module) -> bool:
    """Whether it is two layers and an activation, and nothing else in it acts: timm's may drop or normalise."""
    if hooked(mlp) or type(mlp).forward not in FORWARDS or name_of(mlp.act) is None:
        return False
    if not all(type(layer) in (nn.Linear, nn.Conv2d) and layer.bias is not None for layer in (mlp.fc1, mlp.fc2)):
        return False
    others = (part for name, part in mlp.named_children() if name not in ("fc1", "act", "fc2"))
    return all(isinstance(part, nn.Identity) or (isinstance(part, nn.Dropout) and part.p == 0) for part in others)
