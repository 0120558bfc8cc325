"""Layers that take additions: each becomes a subclass of its class, whose forward adds what the adapters' parts say.

The layer keeps its parameters and their names. Parts are in its child `adapters`, a ModuleDict by adapter name.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_arch.adapters.part import Part
from lean_arch.blocks import MemoryLayer
from lean_arch.ops import sparse_conv1d, sparse_conv2d, sparse_embedding, sparse_linear
from lean_arch.ops.subclass import Mixin, become, revert


class Adapted(Mixin):
    """What the adapted layers have in common."""

    weight_name = "weight"

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        """Whether `layer` computes what this mixin's forward computes. A subclass with a forward of its own may not."""
        raise NotImplementedError

    @classmethod
    def parameter(cls, layer: nn.Module) -> nn.Parameter:
        return getattr(layer, cls.weight_name)

    @staticmethod
    def outputs_first(weight: Tensor) -> Tensor:
        """A view of the weight, or of its gradient, as (O, C, *kernel)."""
        return weight

    @property
    def acting(self) -> list[Part]:
        return [part for part in self.adapters.values() if part.acts]

    def plus(self, y: Tensor, x: Tensor) -> Tensor:
        for part in self.acting:
            added = part.added(x, self)
            if added is not None:
                y = y + added
        return y

    def updates(self) -> list:
        return [update for part in self.acting for update in part.updates()]


class AdaptedLinear(Adapted):
    @classmethod
    def takes(cls, layer):
        return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward

    def forward(self, x):
        updates = self.updates()
        y = sparse_linear(x, self.weight, self.bias, updates) if updates else super().forward(x)
        return self.plus(y, x)


class AdaptedTransposedLinear(Adapted):
    """transformers' Conv1D: a linear layer whose weight is (C, O)."""

    @classmethod
    def takes(cls, layer):
        return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and layer.weight.dim() == 2

    @staticmethod
    def outputs_first(weight):
        return weight.t()

    def forward(self, x):
        updates = self.updates()
        y = sparse_linear(x, self.weight.t(), self.bias, updates) if updates else super().forward(x)
        return self.plus(y, x)


class AdaptedConv(Adapted):
    @classmethod
    def takes(cls, layer):
        kinds = nn.Conv1d, nn.Conv2d
        return isinstance(layer, kinds) and type(layer).forward in (kind.forward for kind in kinds)

    def forward(self, x):
        updates = self.updates()
        if not updates:
            return self.plus(super().forward(x), x)
        convolve = sparse_conv1d if self.weight.dim() == 3 else sparse_conv2d
        padded, padding = x, self.padding
        if self.padding_mode != "zeros":
            padded, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        y = convolve(padded, self.weight, self.bias, updates, self.stride, padding, self.dilation, self.groups)
        return self.plus(y, x)


class AdaptedEmbedding(Adapted):
    @classmethod
    def takes(cls, layer):
        plain = isinstance(layer, nn.Embedding) and type(layer).forward is nn.Embedding.forward
        return plain and layer.max_norm is None and not layer.scale_grad_by_freq

    def forward(self, ids):
        updates = self.updates()
        y = sparse_embedding(ids, self.weight, updates, self.padding_idx) if updates else super().forward(ids)
        return self.plus(y, ids)


class AdaptedNorm(Adapted):
    """A normalisation, whose weight is a vector (C,): the changed one is made anew in each forward pass."""

    @classmethod
    def takes(cls, layer):
        weight = getattr(layer, "weight", None)
        return isinstance(weight, nn.Parameter) and weight.dim() == 1 and is_norm(layer)

    def forward(self, *args, **kwargs):
        updates = self.updates()
        if not updates:
            return super().forward(*args, **kwargs)
        frozen = self.weight
        changed = frozen
        for values, structure in updates:
            changed = changed.index_add(0, structure.index, values.to(frozen.dtype))
        del self._parameters["weight"]
        self.__dict__["weight"] = changed
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.__dict__["weight"]
            self._parameters["weight"] = frozen


class AdaptedAttention(Adapted):
    """nn.MultiheadAttention, which calls no layer to project its inputs."""

    weight_name = "in_proj_weight"

    @classmethod
    def takes(cls, layer):
        plain = isinstance(layer, nn.MultiheadAttention) and type(layer).forward is nn.MultiheadAttention.forward
        return plain and layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        average_attn_weights=True,
        is_causal=False,
    ):
        batched = query.dim() == 3
        q, k, v = (t if self.batch_first or not batched else t.transpose(0, 1) for t in (query, key, value))
        if not batched:
            q, k, v = (t[None] for t in (q, k, v))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        same = query is key and key is value
        q, k, v = (heads(t, self.num_heads) for t in self.project(q, None if same else k, v))
        mask = joined_mask(attn_mask, key_padding_mask, q.dtype, q.shape[0], self.num_heads)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y, weights = F.scaled_dot_product_attention(q, k, v, mask, dropout), None
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not batched:
            return y[0], None if weights is None else weights[0]
        return (y if self.batch_first else y.transpose(0, 1)), weights

    def project(self, q: Tensor, k: Tensor | None, v: Tensor):
        """Three tensors (B, N, E); of q alone where the others are the same."""
        if k is None:
            return self.plus(sparse_linear(q, self.in_proj_weight, self.in_proj_bias, self.updates()), q).chunk(3, -1)
        # a projection of each with the whole weight, of which a third is taken: the updates lie anywhere in it
        whole = (
            self.plus(sparse_linear(t, self.in_proj_weight, self.in_proj_bias, self.updates()), t) for t in (q, k, v)
        )
        return [projected.chunk(3, -1)[third] for third, projected in enumerate(whole)]


def heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, E) -> (B, H, N, E / H)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def joined_mask(attn_mask, key_padding_mask, dtype, batch: int, num_heads: int) -> Tensor | None:
    """Both masks as numbers to add to the scores (B, H, Nq, Nk). As in PyTorch, True says that a key is not seen."""
    total = None
    for mask, padding in ((attn_mask, False), (key_padding_mask, True)):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
        if padding:
            mask = mask[:, None, None]
        elif mask.dim() == 3:
            mask = mask.view(batch, num_heads, *mask.shape[1:])
        total = mask if total is None else total + mask
    return total


MIXINS = (AdaptedLinear, AdaptedTransposedLinear, AdaptedConv, AdaptedEmbedding, AdaptedAttention, AdaptedNorm)


def is_norm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.batchnorm._NormBase) or type(layer).__name__.lower().find("norm") >= 0


def mixin_for(layer: nn.Module) -> type[Adapted] | None:
    """The mixin that takes `layer`, or None."""
    if isinstance(layer, Adapted):
        return next(mixin for mixin in MIXINS if isinstance(layer, mixin))
    return next((mixin for mixin in MIXINS if mixin.takes(layer)), None)


def add_part(layer: nn.Module, name: str, part: Part) -> None:
    """Puts `part` into `layer`, which becomes an adapted one if it is not."""
    if not isinstance(layer, Adapted):
        become(layer, mixin_for(layer))
        layer.adapters = nn.ModuleDict()
    layer.adapters[name] = part


def remove_part(layer: nn.Module, name: str) -> None:
    """Takes it out; the layer is as it was when no part is left."""
    del layer.adapters[name]
    if not layer.adapters:
        del layer.adapters
        revert(layer, Adapted)


def matrix(layer: nn.Module) -> Tensor:
    """The weight that adapters of `layer` change, as (O, C, *kernel), or a memory's values: a view without a graph."""
    if isinstance(layer, MemoryLayer):
        return layer.values.detach()
    mixin = mixin_for(layer)
    return mixin.outputs_first(mixin.parameter(layer).detach())
