"""Blocks are found in any module tree: the ones that a reader of the model would name."""

import pytest
import timm
import torch
from torch import nn

from lean_arch.memory.units import Block, cut, find_blocks


def counted(model):
    names = {module: name for name, module in model.named_modules()}
    return [(names[b.modules[0]], len(b.modules)) for b in find_blocks(model) if b.counted]


@pytest.mark.parametrize(
    ("arch", "number", "first", "last"),
    [
        ("vit_tiny_patch16_224", 12, ("blocks.0", 1), ("blocks.11", 1)),
        ("resnet50", 16, ("layer1.0", 1), ("layer4.2", 1)),
        ("efficientnet_b0", 16, ("blocks.0", 1), ("blocks.6", 1)),
        ("vgg11_bn", 10, ("features.0", 4), ("head", 1)),
        ("convnext_atto", 12, ("stages.0.blocks.0", 1), ("stages.3.blocks.1", 1)),
        ("swin_tiny_patch4_window7_224", 12, ("layers.0.blocks.0", 1), ("layers.3.blocks.1", 1)),
        ("twins_svt_small", 18, ("blocks.0.0", 1), ("blocks.3.3", 1)),
        ("hrnet_w18_small", 24, ("stage2.0.branches.0.0", 1), ("incre_modules.3", 1)),
        ("densenet121", 58, ("features.denseblock1.denselayer1", 1), ("features.denseblock4.denselayer16", 1)),
        ("regnety_002", 11, ("s3.b1", 1), ("s4.b7", 1)),
        ("inception_v3", 16, ("Conv2d_1a_3x3", 1), ("Mixed_7c", 1)),
    ],
)
def test_the_blocks_of_well_known_models(arch, number, first, last):
    with torch.device("meta"):
        model = timm.create_model(arch)
    blocks = counted(model)
    assert (len(blocks), blocks[0], blocks[-1]) == (number, first, last)


@pytest.mark.parametrize("arch", ["resnet50", "vgg11_bn", "hrnet_w18_small", "swin_tiny_patch4_window7_224", "dla34"])
def test_blocks_do_not_overlap_and_cover_nearly_all_of_the_model(arch):
    with torch.device("meta"):
        model = timm.create_model(arch, num_classes=10)
    seen = [m for block in find_blocks(model) for top in block.modules for m in top.modules()]
    assert len(seen) == len(set(seen))
    held = sum(p.numel() for m in seen for p in m.parameters(recurse=False))
    assert held > 0.98 * sum(p.numel() for p in model.parameters())


def test_flat_sequential_groups_layers_with_what_follows_them():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    assert [(b.start, b.stop) for b in find_blocks(model)] == [(0, 3), (3, 5), (5, 6)]


def test_reversible_stacks_are_left_alone_until_switched_off():
    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    stack = nn.ModuleList([block(), block()])
    model = nn.ModuleDict({"stack": stack, "blocks": nn.Sequential(block(), block())})
    stack.reversible = True
    assert counted(model) == [("blocks.0", 1), ("blocks.1", 1)]
    stack.reversible = False
    assert len(counted(model)) == 4


def test_cut_is_even_and_joins_neighbours_only():
    chains = [nn.Sequential(*(nn.Identity() for _ in range(n))) for n in (3, 4, 6, 3)]
    blocks = [Block((layer,), chain, i, True) for chain in chains for i, layer in enumerate(chain)]
    assert [len(s) for s in cut(blocks, 4)] == [3, 4, 6, 3]
    assert [len(s) for s in cut(blocks, 5)] == [3, 4, 3, 3, 3]
    assert [len(s) for s in cut(blocks, 16)] == [1] * 16
    assert [len(s) for s in cut(blocks, 1)] == [3, 4, 6, 3]
    assert [len(s) for s in cut(blocks[7:13], 4)] == [2, 1, 1, 2]
    alone = [Block((nn.Identity(),), counted=True) for _ in range(3)]
    assert [len(s) for s in cut(alone, 1)] == [1, 1, 1]
