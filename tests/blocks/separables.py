"""Blocks that the tests of depthwise-separable blocks have in common."""

import functools

import pytest
import torch
from torch import nn

from lean_arch.blocks import InvertedResidual, SeparableConv2d, UniversalInvertedResidual
from lean_arch.blocks.norm_act import KEEP
from tests.blocks.twins import maps, scattered

NEAR = "conv_dw.weight", "dw_start.conv", "dw_mid.conv", "dw_end.conv"  # by another kernel than PyTorch's
BLOCKS = {
    "inverted": functools.partial(InvertedResidual, 6, 6, kernel_size=5, expansion=3, act="silu"),
    "inverted, halved": functools.partial(InvertedResidual, 6, 9, stride=2, expansion=2.5),
    "inverted, excited": functools.partial(InvertedResidual, 6, 6, expansion=4, act="hardswish", se_channels=3),
    "inverted, dropped": functools.partial(InvertedResidual, 6, 6, expansion=2, act="gelu", drop_path_rate=0.5),
    "inverted, dear": functools.partial(InvertedResidual, 40, 8, expansion=0.5, act="relu"),
    "separable": functools.partial(SeparableConv2d, 6, 10, stride=2),
    "separable, excited": functools.partial(SeparableConv2d, 6, 6, act="hardswish", skip=True, se_channels=2),
    "separable, linear": functools.partial(
        SeparableConv2d, 6, 6, kernel_size=5, dilation=2, act="silu", pointwise_act=False, skip=True, drop_path_rate=0.4
    ),
    "universal": functools.partial(UniversalInvertedResidual, 6, 6, 5, 3, 7, expansion=3, act="silu", se_channels=2),
    "universal, halved": functools.partial(UniversalInvertedResidual, 6, 8, 3, 5, 0, stride=2, drop_path_rate=0.3),
    "universal, at the start": functools.partial(UniversalInvertedResidual, 6, 6, 3, 0, 0, drop_path_rate=0.3),
    "universal, at the end": functools.partial(UniversalInvertedResidual, 6, 6, 0, 0, 3, stride=2, expansion=1.5),
    "universal, nowhere": functools.partial(UniversalInvertedResidual, 6, 6, 0, 0, 0, act="gelu", skip=False),
}
VARIED = "inverted, excited", "inverted, dear", "separable, linear", "universal"
each_block = pytest.mark.parametrize("name", BLOCKS)
each_keep = pytest.mark.parametrize("keep", KEEP)


def build(name, keep="inputs", **options):
    torch.manual_seed(0)
    return scattered(BLOCKS[name](keep=keep, **options)).train()


def maps_for(block, batch=5, size=(9, 7), **how):
    first = next(m for m in block.modules() if isinstance(m, nn.Conv2d))
    return maps(batch, first.in_channels, *size, **how)


def norms_of(block):
    return [m for m in block.modules() if isinstance(m, nn.BatchNorm2d)]
