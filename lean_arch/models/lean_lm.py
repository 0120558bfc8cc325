"""Reversible decoder: a language model over bytes whose training memory does not grow with depth.

Most layers see a window of the last tokens, every few layers one sees all (Longformer, Beltagy et al. 2020, arXiv
2004.05150; Gemma 2, 2024, arXiv 2408.00118, section 2); heads share keys and values (Ainslie et al. 2023, arXiv
2305.13245); positions are rotary; layers are reversible (Reformer, Kitaev et al. 2020, arXiv 2001.04451).

Shapes: B sequences, N tokens, D channels, V vocabulary: tokens (B, N) int64, x (B, N, D).
"""

import math
from numbers import Real

import torch
from torch import Tensor, nn

from lean_arch.blocks import KeyValues, ReversibleSequence, SparseAttention
from lean_arch.blocks.reversible import to_fixed, to_float
from lean_arch.blocks.sizes import check_heads, check_share, check_whole
from lean_arch.models.lean_sequence import (
    VOCABULARY,
    ReversibleDecoder,
    check_batch,
    embedded,
    middle_size,
    sub_layer,
)
from lean_arch.ops.patterns import causal, local
from lean_arch.registry import SEQUENCE_MODELS

__all__ = ["LeanLM"]


class LeanLM(ReversibleDecoder):
    """Predicts each next token from those before it.

    Args:
        vocab_size: tokens there are; by default bytes and a few specials.
        seq_len: length to train on where nobody asks for another; any length works.
        dim, depth, num_heads, num_kv_heads: channels, layers, query heads, key-value heads.
        window: tokens before its own that a token sees in most layers.
        global_every: every so many layers one sees all tokens before.
        mlp_ratio: width of the feed-forward layers over `dim`.
        tied: the projection onto the vocabulary is the embedding itself.
        drop_rate: dropout after each sub-layer.
        chunks: most parts of the batch that a layer's backward works on, one after the other.

    Raises ValueError for sizes that cannot be, or that do not fit each other.
    """

    def __init__(
        self,
        vocab_size: int = VOCABULARY,
        seq_len: int = 256,
        dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        window: int = 64,
        global_every: int = 4,
        mlp_ratio: float = 4.0,
        tied: bool = True,
        drop_rate: float = 0.0,
        chunks: int = 4,
    ):
        super().__init__()
        check_whole(1, vocab_size=vocab_size, seq_len=seq_len, depth=depth, window=window, global_every=global_every)
        check_heads(dim, num_heads)
        check_share(drop_rate=drop_rate)
        hidden = middle_size(dim, mlp_ratio)
        self.seq_len = seq_len
        self.embed = nn.Embedding(vocab_size, dim)
        layers = []
        for number in range(1, depth + 1):
            pattern = causal() if number % global_every == 0 else local(window, 0)
            attention = SparseAttention(dim, num_heads, pattern, num_kv_heads)
            feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            layers.append((sub_layer(dim, drop_rate, attn=attention), sub_layer(dim, drop_rate, mlp=feed_forward)))
        self.blocks = ReversibleSequence(layers, chunks=chunks, least_chunk=2**16)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.draw_weights()
        if tied:
            self.head.weight = self.embed.weight

    def forward_features(self, tokens: Tensor) -> Tensor:
        """(B, N) -> (B, N, D)"""
        x = embedded(self.embed, tokens)
        return self._fuse(*self.blocks((x, x)))

    def _fuse(self, y1: Tensor, y2: Tensor) -> Tensor:
        return self.norm((y1 + y2) * 0.5)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`tokens` (B, N) and `max_new_tokens` more after them, (B, N + max_new_tokens).

        Each is drawn from the model's distribution, at `temperature` (0: the likeliest), among the `top_k` likeliest.
        Keys and values are kept, in local layers those of the window only. Call `eval()` first, or dropout acts.

        Raises ValueError for an empty prompt, tokens that are none, or an option out of range.
        """
        check_batch(tokens)
        check_whole(0, max_new_tokens=max_new_tokens)
        if not isinstance(temperature, Real) or not 0 <= temperature < math.inf:
            raise ValueError(f"temperature {temperature!r} must be a finite number, 0 or more")
        if top_k is not None:
            check_whole(1, top_k=top_k)
        caches = [KeyValues() for _ in self.blocks]
        new = tokens
        for _ in range(max_new_tokens):
            logits = self.head(self._continue(new, caches)[:, -1]).float()
            new = pick(logits, temperature, top_k, generator)
            tokens = torch.cat((tokens, new), 1)
        return tokens

    def _continue(self, tokens: Tensor, caches: list[KeyValues]) -> Tensor:
        """`forward_features` of tokens that follow those in `caches`: the blocks' own arithmetic."""
        x = embedded(self.embed, tokens)
        wide = torch.promote_types(x.dtype, torch.float32)
        a = b = to_fixed(x, wide)
        for block, cache in zip(self.blocks, caches, strict=True):
            out = block.f.attn(block.f.norm(to_float(b, wide).to(x.dtype)), cache=cache)
            a, b = b, a + to_fixed(out, wide)
            a, b = b, a + to_fixed(block.g(to_float(b, wide).to(x.dtype)), wide)
        return self._fuse(to_float(a, wide).to(x.dtype), to_float(b, wide).to(x.dtype))


def pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token (B, 1) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


@SEQUENCE_MODELS.register("lean_lm")
def lean_lm(**kwargs) -> LeanLM:
    """The smallest of the family, the same as lean_lm_tiny."""
    return lean_lm_tiny(**kwargs)


@SEQUENCE_MODELS.register("lean_lm_tiny")
def lean_lm_tiny(**kwargs) -> LeanLM:
    """4 layers of 128 channels, 4 heads; 0.8M parameters."""
    return LeanLM(**kwargs)


@SEQUENCE_MODELS.register("lean_lm_small")
def lean_lm_small(**kwargs) -> LeanLM:
    """12 layers of 512 channels, 8 heads; a quarter as many key-value heads."""
    sizes = {"seq_len": 2048, "dim": 512, "depth": 12, "num_heads": 8, "num_kv_heads": 2, "window": 256}
    return LeanLM(**sizes | kwargs)


@SEQUENCE_MODELS.register("lean_lm_base")
def lean_lm_base(**kwargs) -> LeanLM:
    """24 layers of 1024 channels, 16 heads; a quarter as many key-value heads."""
    sizes = {"seq_len": 4096, "dim": 1024, "depth": 24, "num_heads": 16, "num_kv_heads": 4, "window": 512}
    return LeanLM(**sizes | {"global_every": 6} | kwargs)
