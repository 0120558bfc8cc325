"""Longformer: each token sees a window around it, and a few global tokens see all and are seen by all.

Beltagy et al. 2020, arXiv 2004.05150. The layers are those of Hugging Face's LongformerModel, whose weights load:
learnt positions, norms after the sums, and projections of their own for what global tokens see. A layer keeps x, the
window's queries, keys and values, and the two sums; the wide middle of its feed-forward part and the global tokens'
keys and values are made again during backward.

Shapes: B sequences, N tokens, G global tokens (of the sequence with most), C channels, H heads of D channels, V
vocabulary: tokens (B, N) int64, x (B, N, C), heads (B, H, N, D).
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lean_arch.blocks import ChunkedFeedForward
from lean_arch.blocks.sizes import check_heads, check_share, check_whole
from lean_arch.models.lean_sequence import (
    VOCABULARY,
    Special,
    check_batch,
    class_loss,
    embedded,
    kind_of,
    middle_size,
    token_loss,
)
from lean_arch.ops import sparse_attention
from lean_arch.ops.patterns import dense, global_tokens, local
from lean_arch.registry import SEQUENCE_MODELS

__all__ = ["LeanLongformer"]


@dataclasses.dataclass(frozen=True)
class Sight:
    """Which tokens of a batch are global and which are hidden; the same for all layers.

    Two tokens see each other only if their segments are equal; None: all are.
    """

    at: Tensor  # (B, G) where the global tokens are; a sequence with fewer has others at the end
    counts: Tensor  # (B, G) bool, False for those others
    segments: tuple[Tensor, Tensor] | None  # of the N queries; of the G global keys and then all N
    global_segments: tuple[Tensor, Tensor] | None  # of the G global queries; of the N keys

    def pick(self, x: Tensor) -> Tensor:
        """The global tokens (B, G, C) of x (B, N, C)."""
        return x[torch.arange(len(x), device=x.device)[:, None], self.at]  # unlike gather it does not keep x

    def put(self, x: Tensor, rows: Tensor) -> Tensor:
        """x (B, N, C) with `rows` (B, G, C) for its global tokens."""
        rows = torch.where(self.counts[..., None], rows, self.pick(x))
        return x.scatter(1, self.at[..., None].expand_as(rows), rows)


def look(seen: Tensor | None, chosen: Tensor, most: int) -> Sight:
    """`seen` (B, N) bool: tokens that are no padding (None: all); `chosen` (B, N) bool: global, at most `most`."""
    if seen is not None:
        chosen = chosen & seen
    at = chosen.to(torch.uint8).argsort(stable=True, dim=1, descending=True)[:, :most]
    counts = chosen.gather(1, at)
    if seen is None and most == 0:
        return Sight(at, counts, None, None)
    # a global key stands before all the others, where every query sees it: in its place it must not count again
    hidden = chosen if seen is None else chosen | ~seen
    keys = torch.cat((~counts, hidden), 1).to(torch.int32)
    nothing = torch.zeros_like(hidden, dtype=torch.int32)
    if seen is None:
        return Sight(at, counts, (nothing, keys), None)
    padding = (~seen).to(torch.int32)
    return Sight(at, counts, (2 * padding, keys), (nothing[:, :most], padding))


class LongformerAttention(nn.Module):
    """Attention in a window of `window` tokens on each side, and of global tokens in both directions."""

    def __init__(self, dim: int, num_heads: int, window: int, dropout: float):
        super().__init__()
        self.num_heads, self.window, self.dropout = num_heads, window, dropout
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.query_global, self.key_global, self.value_global = (nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        """(B, N, C) -> (B, N, C)"""
        number = sight.at.shape[1]
        k, v = self.key(x), self.value(x)
        if number:
            k, v = (torch.cat((sight.pick(t), t), 1) for t in (k, v))
        out = self.proj(self._attend(self.query(x), k, v, local(self.window) | global_tokens(number), sight.segments))
        if not number:
            return out
        draws = self.training and self.dropout > 0
        rows = checkpoint(self._of_globals, x, sight, use_reentrant=False, preserve_rng_state=draws)
        return sight.put(out, self.proj(rows))

    def _of_globals(self, x: Tensor, sight: Sight) -> Tensor:
        """(B, N, C) -> (B, G, C): what the global tokens see, by their own projections."""
        q, k, v = self.query_global(sight.pick(x)), self.key_global(x), self.value_global(x)
        return self._attend(q, k, v, dense(), sight.global_segments)

    def _attend(self, q, k, v, pattern, segments) -> Tensor:
        q, k, v = (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        out = sparse_attention(q, k, v, pattern, segment_ids=segments, dropout_p=dropout)
        return out.transpose(1, 2).flatten(2)


class LongformerLayer(nn.Module):
    """Attention and feed-forward, each added to its input and then normalised."""

    def __init__(self, attention: LongformerAttention, mlp: ChunkedFeedForward, dim: int, drop_rate: float, eps: float):
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        x = self.norm1(self.drop(self.attention(x, sight)) + x)
        return self.norm2(self.drop(self.mlp(x)) + x)


class LeanLongformer(nn.Module):
    """Finds hidden tokens or, with `num_classes`, says which class a sequence is of.

    Args:
        vocab_size: tokens there are; by default bytes and a few specials.
        num_classes: 0 for a model of hidden tokens, else classes of a sequence, told from its first token.
        seq_len: longest sequence, for positions are learnt; length to train on where nobody asks for another.
        dim, depth, num_heads: channels, layers, heads.
        window: tokens on each side that a token sees; one number, or one for each layer.
        global_tokens: so many tokens at the start are global where no mask says which are.
        mlp_ratio: width of the feed-forward layers over `dim`.
        drop_rate: dropout of the embeddings and after each sub-layer. attn_drop_rate: of the attention weights.
        pad_id: the token that has no position and learns nothing; by default that of the bytes (256), or none where
            vocab_size ends before it.
        eps: of the layer norms.
        chunks: parts of the tokens for which the middle of a feed-forward layer exists at a time.

    Raises ValueError for sizes that cannot be, or that do not fit each other.
    """

    objective = "masked"

    def __init__(
        self,
        vocab_size: int = VOCABULARY,
        num_classes: int = 0,
        seq_len: int = 256,
        dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        window: int | Sequence[int] = 32,
        global_tokens: int = 1,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        pad_id: int | None = None,
        eps: float = 1e-5,
        chunks: int = 4,
    ):
        super().__init__()
        check_whole(1, vocab_size=vocab_size, seq_len=seq_len, depth=depth)
        check_whole(0, num_classes=num_classes, global_tokens=global_tokens)
        check_heads(dim, num_heads)
        check_share(drop_rate=drop_rate, attn_drop_rate=attn_drop_rate)
        hidden = middle_size(dim, mlp_ratio)
        if not isinstance(eps, Real) or not 0 < eps < math.inf:
            raise ValueError(f"eps {eps!r} must be a number above 0; 1e-5 is usual")
        if pad_id is None:
            pad_id = int(Special.PAD) if vocab_size > Special.PAD else None
        elif pad_id not in range(vocab_size):
            raise ValueError(f"pad_id {pad_id} is no token of vocab_size {vocab_size}; 0 to {vocab_size - 1} are")
        windows = list(window) if isinstance(window, list | tuple) else [window] * depth
        if len(windows) != depth:
            raise ValueError(f"window {window} has {len(windows)} numbers for depth {depth}; one number works too")
        for width in windows:
            check_whole(0, window=width)
        self.seq_len, self.num_classes, self.global_tokens = seq_len, num_classes, global_tokens
        self.embed = nn.Embedding(vocab_size, dim, padding_idx=pad_id)
        self.positions = nn.Embedding(1 + seq_len, dim, padding_idx=0)
        self.norm = nn.LayerNorm(dim, eps)
        self.drop = nn.Dropout(drop_rate)
        self.layers = nn.ModuleList(
            LongformerLayer(
                LongformerAttention(dim, num_heads, width, attn_drop_rate),
                ChunkedFeedForward(dim, hidden, chunks),
                dim,
                drop_rate,
                eps,
            )
            for width in windows
        )
        if num_classes:
            self.head = nn.Sequential(
                nn.Dropout(drop_rate),
                nn.Linear(dim, dim),
                nn.Tanh(),
                nn.Dropout(drop_rate),
                nn.Linear(dim, num_classes),
            )
        else:
            self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim, eps))
            self.bias = nn.Parameter(torch.zeros(vocab_size))
        self._draw()

    def _draw(self) -> None:
        """Weights of 0.02, zero for biases and padding, as BERT's."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx].detach())

    def forward_features(
        self, tokens: Tensor, attention_mask: Tensor | None = None, global_attention_mask: Tensor | None = None
    ) -> Tensor:
        """(B, N) -> (B, N, C). The masks (B, N) are those of `forward`."""
        x = embedded(self.embed, tokens)
        sight = self._look(tokens, attention_mask, global_attention_mask)
        pad_id = self.embed.padding_idx
        some = torch.ones_like(tokens, dtype=torch.bool) if pad_id is None else tokens != pad_id
        x = self.drop(self.norm(x + self.positions(some.cumsum(1) * some)))
        for layer in self.layers:
            x = layer(x, sight)
        return x

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Logits (B, N, V), or with `targets` (B, N), -100 where none, the loss summed over them, without logits.

        Of a classifier: logits (B, num_classes), or with `targets` (B,) the loss summed over the sequences.

        Args:
            attention_mask: (B, N), 0 where a token is padding, which no token sees; by default none is.
            global_attention_mask: (B, N), 1 where a token is global; by default the first `global_tokens` are.

        Raises ValueError for shapes that do not fit, for more than `seq_len` tokens, and for tokens or targets of
        another kind or range.
        """
        check_batch(tokens, targets, of_sequences=self.num_classes > 0)
        x = self.forward_features(tokens, attention_mask, global_attention_mask)
        if self.num_classes:
            logits = self.head(x[:, 0])
            return logits if targets is None else class_loss(logits, targets, label_smoothing)
        x = self.head(x)
        if targets is None:
            return F.linear(x, self.embed.weight, self.bias)
        return token_loss(x, self.embed.weight, self.bias, targets, label_smoothing)

    def _look(self, tokens, attention_mask, global_attention_mask) -> Sight:
        length = tokens.shape[1]
        if length > self.seq_len:
            raise ValueError(f"tokens are {length} long, but there are positions for 1 to {self.seq_len} (seq_len)")
        for name, mask in (("attention_mask", attention_mask), ("global_attention_mask", global_attention_mask)):
            if mask is not None and not (isinstance(mask, Tensor) and mask.shape == tokens.shape):
                raise ValueError(f"{name} must be a tensor {tuple(tokens.shape)} as tokens, got {kind_of(mask)}")
        seen = None if attention_mask is None else attention_mask != 0
        if global_attention_mask is None:
            most = min(self.global_tokens, length)
            return look(seen, (torch.arange(length, device=tokens.device) < most).expand(tokens.shape), most)
        chosen = global_attention_mask != 0
        return look(seen, chosen, int((chosen if seen is None else chosen & seen).sum(1).max()))

    @classmethod
    def from_huggingface(cls, model: nn.Module, **options) -> "LeanLongformer":
        """A model of the sizes and weights of a Hugging Face Longformer; `options` are further arguments of ours.

        Without a mask no token is global, as there. Its own dropout rates hold unless others are given.

        Raises ValueError when its activation is none of ours.
        """
        config = model.config
        if config.hidden_act != "gelu":
            raise ValueError(f"hidden_act {config.hidden_act!r} of the model is not what this family has; 'gelu' is")
        widths = config.attention_window
        widths = [widths] * config.num_hidden_layers if isinstance(widths, int) else widths
        sizes = {
            "vocab_size": config.vocab_size,
            "seq_len": config.max_position_embeddings - config.pad_token_id - 1,
            "dim": config.hidden_size,
            "depth": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "window": [width // 2 for width in widths],
            "global_tokens": 0,
            "mlp_ratio": config.intermediate_size / config.hidden_size,
            "drop_rate": config.hidden_dropout_prob,
            "attn_drop_rate": config.attention_probs_dropout_prob,
            "pad_id": config.pad_token_id,
            "eps": config.layer_norm_eps,
        }
        ours = cls(**sizes | options).to(model.device, model.dtype)
        ours.load_huggingface(model)
        return ours.train(model.training)

    def load_huggingface(self, source: nn.Module | Mapping[str, Tensor]) -> None:
        """Takes over the weights of a Hugging Face Longformer, or of its state_dict.

        A head is taken where there is one for the same task, else ours stays as it is; the pooler has no counterpart.
        All tokens are of the first token type, whose embedding is added to the positions. With the same masks (and
        `pad_id`, `window` and `eps`) `forward_features` then gives its last_hidden_state.

        Raises ValueError when the sizes are not ours; the model is then unchanged.
        """
        if self.embed.padding_idx is None:
            raise ValueError("pad_id None has no counterpart in a Longformer of Hugging Face; give its pad_token_id")
        state = renamed(source.state_dict() if isinstance(source, nn.Module) else source, self.embed.padding_idx)
        mine = self.state_dict()
        lacks = [name for name in mine if name not in state and not name.startswith(("head.", "bias"))]
        if lacks:
            raise ValueError(f"source lacks {lacks[0]} and {len(lacks) - 1} others of a Longformer of this depth")
        deeper = [name for name in state if name.startswith("layers.") and name not in mine]
        if deeper:
            raise ValueError(f"source has {deeper[0]}, but depth is {len(self.layers)}")
        state = {name: tensor for name, tensor in state.items() if name in mine}
        for name, tensor in state.items():
            if tensor.shape != mine[name].shape:
                raise ValueError(f"source has {name} of {tuple(tensor.shape)}, but ours is {tuple(mine[name].shape)}")
        self.load_state_dict(state, strict=False)


# names of Hugging Face, and ours
NAMES = {
    r"^longformer\.": "",
    r"^embeddings\.word_embeddings\.": "embed.",
    r"^embeddings\.position_embeddings\.": "positions.",
    r"^embeddings\.LayerNorm\.": "norm.",
    r"^encoder\.layer\.": "layers.",
    r"\.attention\.self\.": ".attention.",
    r"\.attention\.output\.dense\.": ".attention.proj.",
    r"\.attention\.output\.LayerNorm\.": ".norm1.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"\.output\.dense\.": ".mlp.fc2.",
    r"\.output\.LayerNorm\.": ".norm2.",
    r"^lm_head\.dense\.": "head.0.",
    r"^lm_head\.layer_norm\.": "head.2.",
    r"^lm_head\.bias$": "bias",
    r"^classifier\.dense\.": "head.1.",
    r"^classifier\.out_proj\.": "head.4.",
}


def renamed(state: Mapping[str, Tensor], pad_id: int) -> dict[str, Tensor]:
    """The weights of Hugging Face under our names; positions begin after the one of padding, as ours do."""
    ours = {}
    for name, tensor in state.items():
        for theirs, mine in NAMES.items():
            name = re.sub(theirs, mine, name)
        ours[name] = tensor
    kinds, positions = ours.get("embeddings.token_type_embeddings.weight"), ours.get("positions.weight")
    if kinds is not None and positions is not None:
        ours["positions.weight"] = positions[pad_id:] + kinds[0]
    return ours


@SEQUENCE_MODELS.register("lean_longformer")
def lean_longformer(**kwargs) -> LeanLongformer:
    """The smallest of the family, the same as lean_longformer_tiny."""
    return lean_longformer_tiny(**kwargs)


@SEQUENCE_MODELS.register("lean_longformer_tiny")
def lean_longformer_tiny(**kwargs) -> LeanLongformer:
    """4 layers of 128 channels, 4 heads; 1.1M parameters."""
    return LeanLongformer(**kwargs)


@SEQUENCE_MODELS.register("lean_longformer_small")
def lean_longformer_small(**kwargs) -> LeanLongformer:
    """8 layers of 512 channels, 8 heads; 33M parameters."""
    sizes = {"seq_len": 2048, "dim": 512, "depth": 8, "num_heads": 8, "window": 128, "chunks": 8}
    return LeanLongformer(**sizes | kwargs)


@SEQUENCE_MODELS.register("lean_longformer_base")
def lean_longformer_base(**kwargs) -> LeanLongformer:
    """12 layers of 768 channels, 12 heads: longformer-base-4096 with `vocab_size=50265, pad_id=1`."""
    sizes = {"seq_len": 4096, "dim": 768, "depth": 12, "num_heads": 12, "window": 256, "chunks": 8}
    return LeanLongformer(**sizes | kwargs)
