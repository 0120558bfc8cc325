"""Low-rank adaptation: what is added to a weight is the product of two thin matrices.

Hu et al. 2021, "LoRA" (arXiv 2106.09685); scaling by alpha / sqrt(rank): Kalajdzievski 2023 (arXiv 2312.03732).

Shapes: weight (O, C, *kernel); down (r, C, *kernel), up (O, r): the update is up @ down.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_arch.adapters.layers import AdaptedConv, AdaptedEmbedding, matrix
from lean_arch.adapters.method import LayerMethod
from lean_arch.adapters.part import Part, value_dtype
from lean_arch.registry import ADAPTERS


class LoRAPart(Part):
    """down (r, C, *kernel) and up (O', r), O' the outputs it adds to: all, or those in `rows`."""

    def __init__(self, down: Tensor, up: Tensor, scale: float, dropout: float, rows: Tensor | None):
        super().__init__()
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)
        self.scale, self.dropout = scale, nn.Dropout(dropout)
        self.register_buffer("rows", rows)

    def added(self, x, layer):
        if isinstance(layer, AdaptedEmbedding):
            y = F.linear(F.embedding(x, self.down.t()), self.up)
        else:
            x = self.dropout(x)
            if not torch.is_autocast_enabled(x.device.type):
                x = x.to(self.down.dtype)
            if isinstance(layer, AdaptedConv):
                y = self.convolved(x, layer)
            else:
                y = F.linear(F.linear(x, self.down), self.up)
        return self.spread(y * (self.scale * self.strength), layer)

    def convolved(self, x: Tensor, layer: nn.Module) -> Tensor:
        convolve, padding = F.conv1d if self.down.dim() == 3 else F.conv2d, layer.padding
        if layer.padding_mode != "zeros":
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
        low = convolve(x, self.down, None, layer.stride, padding, layer.dilation)
        return convolve(low, self.up[(..., *[None] * (self.down.dim() - 2))])

    def spread(self, y: Tensor, layer: nn.Module) -> Tensor:
        """To all outputs, zero where this adds nothing. Channels are last, for only fused projections have `rows`."""
        if self.rows is None:
            return y
        return y.new_zeros(*y.shape[:-1], matrix(layer).shape[0]).index_copy(-1, self.rows, y)

    def changes(self, weight, groups):
        update = (self.up.float() @ self.down.float().flatten(1)) * (self.scale * self.strength)
        if self.rows is not None:
            update = update.new_zeros(weight.shape[0], update.shape[1]).index_copy(0, self.rows, update)
        yield None, update


@ADAPTERS.register("lora")
class LoRA(LayerMethod):
    """Low-rank adaptation of linear layers, convolutions without groups, and embeddings.

    Args:
        rank: r.
        alpha: the update is alpha / rank times the product; default: rank.
        dropout: share of the layer's input set to zero before it, in training.
        rank_stabilized: alpha / sqrt(rank) in place of alpha / rank.
        seed: of the first values of `down`; `up` begins as zero.
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        rank_stabilized: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank {rank!r} must be a whole number, 1 or more")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout {dropout!r} must be a share, 0 or more and below 1")
        self.rank, self.alpha, self.dropout = rank, rank if alpha is None else alpha, dropout
        self.rank_stabilized, self.seed = rank_stabilized, seed
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def part(self, layer):
        if layer.weight.dim() < 2:
            raise ValueError(
                f"layer {layer.name!r} has a weight of one dimension, which has no rank; 'sparse' takes it"
            )
        if layer.groups > 1:
            raise ValueError(f"layer {layer.name!r} is a convolution of {layer.groups} groups; 'sparse' takes those")
        dtype, device = value_dtype(layer.weight), layer.weight.device
        down = torch.empty(self.rank, *layer.weight.shape[1:])
        nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=self.generator)
        outputs = layer.weight.shape[0] if layer.rows is None else len(layer.rows)
        up = torch.zeros(outputs, self.rank, dtype=dtype, device=device)
        return LoRAPart(down.to(device, dtype), up, self.scale, self.dropout, layer.rows)

    def blank(self, layer, state, facts):
        down, up, rows = (state.get(name) for name in ("down", "up", "rows"))
        return LoRAPart(torch.empty_like(down), torch.empty_like(up), self.scale, self.dropout, rows)

    def find(self, model, target, qkv):
        layers = super().find(model, target, qkv)
        if target in ("layers", "convs"):  # grouped convolutions that nobody named
            layers = [layer for layer in layers if layer.groups == 1]
        return layers

    def facts(self):
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "dropout": self.dropout,
            "rank_stabilized": self.rank_stabilized,
            "seed": self.seed,
        }
