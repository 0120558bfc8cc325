"""Reversible Vision Transformer: a ViT whose training memory does not grow with depth.

Papers: An Image is Worth 16x16 Words (Dosovitskiy et al. 2020, arXiv 2010.11929); Reversible Vision Transformers
(Mangalam et al. 2022, arXiv 2302.04869). Attention and feed-forward sub-layers update two residual streams in turn;
backward rebuilds the streams exactly instead of keeping activations, a part of the batch at a time.

Shapes: B images, N tokens (patches and class token), D channels: tokens (B, N, D).
"""

from collections import OrderedDict
from typing import Any

import torch
from timm.layers import register_notrace_module
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lean_arch.blocks import ReversiblePair, ReversibleSequence

__all__ = ["LeanVisionTransformer"]

register_notrace_module(ReversibleSequence)  # torch.fx keeps the stack as one node


class LeanBlock(ReversiblePair):
    """f: norm, attention; g: norm, feed-forward; each with LayerScale and stochastic depth where asked for."""

    def __init__(self, **kwargs):
        block = Block(**kwargs)  # timm's parts and their defaults, regrouped
        super().__init__(
            _sub_layer(norm=block.norm1, attn=block.attn, ls=block.ls1, drop_path=block.drop_path1),
            _sub_layer(norm=block.norm2, mlp=block.mlp, ls=block.ls2, drop_path=block.drop_path2),
        )


def _sub_layer(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict((n, m) for n, m in parts.items() if not isinstance(m, nn.Identity)))


class LeanVisionTransformer(VisionTransformer):
    """timm's VisionTransformer on a reversible stack; takes the same arguments.

    Args:
        chunks: most parts of the batch that a layer's backward works on, one after the other.
        kwargs: as timm.models.VisionTransformer; attention masks are not supported.
    """

    def __init__(self, *, chunks: int = 4, **kwargs):
        super().__init__(block_fn=LeanBlock, **kwargs)
        self.blocks = ReversibleSequence(self.blocks, chunks=chunks, least_chunk=2**16)

    def fix_init_weight(self) -> None:
        with torch.no_grad():
            for index, block in enumerate(self.blocks):
                scale = (2.0 * (index + 1)) ** 0.5
                block.f.attn.proj.weight.div_(scale)
                block.g.mlp.fc2.weight.div_(scale)

    @torch.jit.ignore
    def set_reversible(self, enabled: bool) -> None:
        """False: the same mathematics with activations stored; True (the default): rebuilt in backward."""
        self.blocks.reversible = enabled

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputing in backward is what the reversible stack does."""
        self.set_reversible(enable)

    def _embed(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D)"""
        x = self.patch_embed(x) if torch.jit.is_scripting() else self._patches(x)
        return self.norm_pre(self.patch_drop(self._pos_embed(x)))

    @torch.jit.unused
    def _patches(self, x: Tensor) -> Tensor:
        # Autocast's 16-bit copy of the images would be kept for the weight gradient; casting again costs nothing.
        if self.blocks.reversible and torch.is_grad_enabled() and torch._C._is_any_autocast_enabled():
            return checkpoint(self.patch_embed, x, use_reentrant=False)
        return self.patch_embed(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D)"""
        x = self._embed(x)
        y1, y2 = self.blocks((x, x))
        return self.norm(_fuse(y1, y2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, num_classes)"""
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]] | dict[str, Any]:
        """Features of the layers `indices` (the last n if an int, all if None), as timm's ViT gives them.

        Arguments and results are those of timm.models.VisionTransformer.forward_intermediates. Each layer taken
        is kept for backward; the layers between are rebuilt.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")
        if attn_mask is not None:
            raise ValueError("attn_mask is not supported by a reversible ViT; pass None")
        take_indices, _ = feature_take_indices(len(self.blocks), indices)
        height, width = x.shape[-2:]
        x = self._embed(x)
        streams, taken, start = (x, x), [], 0
        for index in sorted(set(take_indices)):
            streams = self.blocks[start : index + 1](streams)
            start = index + 1
            y = _fuse(*streams)
            taken.append(self.norm(y) if norm else y)
        if not stop_early and start < len(self.blocks):
            streams = self.blocks[start:](streams)

        prefix = [y[:, : self.num_prefix_tokens] for y in taken]
        taken = [y[:, self.num_prefix_tokens :] for y in taken]
        if output_fmt == "NCHW":
            grid = self.patch_embed.dynamic_feat_size((height, width))
            taken = [y.transpose(1, 2).unflatten(2, grid).contiguous() for y in taken]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            result = {"image_intermediates": taken}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self.norm(_fuse(*streams))
            return result
        if with_prefix:
            taken = list(zip(taken, prefix))
        return taken if intermediates_only else (self.norm(_fuse(*streams)), taken)


def _fuse(y1: Tensor, y2: Tensor) -> Tensor:
    """Mean of the two streams; both get the same gradient tensor."""
    return (y1 + y2) * 0.5


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2302.04869",
        "paper_name": "Reversible Vision Transformers",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        name: _cfg()
        for name in (
            "lean_vit.untrained",
            "lean_vit_tiny.untrained",
            "lean_vit_small.untrained",
            "lean_vit_base.untrained",
            "lean_vit_large.untrained",
        )
    }
)


def _create(variant: str, pretrained: bool, **kwargs) -> LeanVisionTransformer:
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        LeanVisionTransformer,
        variant,
        pretrained,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def lean_vit(pretrained: bool = False, **kwargs) -> LeanVisionTransformer:
    """The smallest of the family, the same as lean_vit_tiny."""
    return _create("lean_vit", pretrained, **{"embed_dim": 192, "num_heads": 3, **kwargs})


@register_model
def lean_vit_tiny(pretrained: bool = False, **kwargs) -> LeanVisionTransformer:
    """ViT-Ti/16's sizes: 12 layers of 192 channels, 3 heads; 5.7M parameters."""
    return _create("lean_vit_tiny", pretrained, **{"embed_dim": 192, "num_heads": 3, **kwargs})


@register_model
def lean_vit_small(pretrained: bool = False, **kwargs) -> LeanVisionTransformer:
    """ViT-S/16's sizes: 12 layers of 384 channels, 6 heads; 22M parameters."""
    return _create("lean_vit_small", pretrained, **{"embed_dim": 384, "num_heads": 6, **kwargs})


@register_model
def lean_vit_base(pretrained: bool = False, **kwargs) -> LeanVisionTransformer:
    """ViT-B/16's sizes: 12 layers of 768 channels, 12 heads; 86M parameters."""
    return _create("lean_vit_base", pretrained, **{"embed_dim": 768, "num_heads": 12, **kwargs})


@register_model
def lean_vit_large(pretrained: bool = False, **kwargs) -> LeanVisionTransformer:
    """ViT-L/16's sizes: 24 layers of 1024 channels, 16 heads; 304M parameters."""
    return _create("lean_vit_large", pretrained, **{"embed_dim": 1024, "depth": 24, "num_heads": 16, **kwargs})
