"""timm's MobileNets and EfficientNets whose stem and first blocks, the largest maps of all, are one chain.

Between two parts of a chain nobody keeps an activation; so up to the first block that is more than convolutions and
norms, in MobileNetV1 to the last, no map is kept but the results of dear convolutions. Features and checkpointed passes
run part by part, as in timm.

Shapes: x (B, 3, H, W), features (B, C, H / 32, W / 32).
"""

import torch
from timm.models._efficientnet_blocks import ConvBnAct
from timm.models.efficientnet import EfficientNet
from timm.models.mobilenetv3 import MobileNetV3
from torch import Tensor, nn

from lean_arch.blocks import SeparableConv2d
from lean_arch.blocks.norm_act import Chain, alternate, hooked, renamed, runs_lean


class _Opening:
    def forward_features(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting() or self.grad_checkpointing or not self.opens_lean(x):
            return self.textbook(x)
        return self.lean(x)

    @torch.jit.unused
    def opens_lean(self, x: Tensor) -> bool:
        parts = self.opening()[0]
        return not hooked(self.blocks) and runs_lean(x, *parts) and alternate(parts)

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        parts, stages = self.opening()
        chain = Chain(self.keep)
        z = chain.conv(x, parts[0])
        for norm, conv in zip(parts[1::2], parts[2::2]):
            z = chain.conv(chain.norm(z, norm), conv)
        chain.end()
        return self.blocks[stages:](parts[-1](z))

    @torch.jit.unused
    def opening(self) -> tuple[list[nn.Module], int]:
        """Convolutions, each with its norm behind it, and the number of stages they are."""
        parts, stages = [self.conv_stem, self.bn1], 0
        for stage in self.blocks:
            if not all(map(_is_straight, stage)):
                break
            parts += [part for block in stage for part in block.children() if not isinstance(part, nn.Identity)]
            stages += 1
        return parts, stages


def _is_straight(block: nn.Module) -> bool:
    """Whether it is convolutions and norms, one after the other."""
    straight = isinstance(block, ConvBnAct | SeparableConv2d) and not block.has_skip
    return straight and all(isinstance(part, nn.Conv2d | nn.BatchNorm2d | nn.Identity) for part in block.children())


class LeanMobileNetV3(_Opening, MobileNetV3):
    textbook = renamed(MobileNetV3.forward_features, "textbook")


class LeanEfficientNet(_Opening, EfficientNet):
    textbook = renamed(EfficientNet.forward_features, "textbook")

    @torch.jit.unused
    def lean(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv_head(super().lean(x)))
