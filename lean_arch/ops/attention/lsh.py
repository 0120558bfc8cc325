"""LSH attention (Reformer, Kitaev et al. 2020, arXiv 2001.04451): a token attends to tokens that hash as it does.

Queries and keys are one tensor, the keys at length 1. Each round turns the tokens by random rotations, takes the
nearest axis for their bucket (section 2), sorts them by (bucket, position) and cuts the sorted sequence into chunks; a
chunk sees itself and the one before it. The rounds together are ONE softmax over all they see, a key as often as it is
seen: their results are merged by log-sum-exp weights, and the backward pass needs nothing of a round but its order.

A token sees itself only where it sees no other: such a row gives its own value, and its softmax over one key has no
slope. So no score is ever lowered by a penalty, and the log-sum-exp, kept for the backward pass, is that of the others.

As in the paper's section 2 the first chunk does not look around to the last, whose buckets are unlike its own. Were it
to, the error to full attention would fall by 0 to 4% in 16 chunks, by up to 9% in 8 and by less in more; but two chunks
that see each other are all there is, so up to twice the bucket size there is one chunk: full attention, at the cost
that two would have.

Shapes: qk, v, out (B, H, N, D); lse (B, H, N), -inf where a token sees no other; order (B, H, R, N) int32: the position
of the n-th token in the order of round r.
"""

import importlib
import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_arch.ops.attention import lsh_portable
from lean_arch.ops.attention.op import DTYPES, HEAD_SIZES, _backend, _integers, products_bytes, row_products
from lean_arch.ops.attention.problem import arithmetic
from lean_arch.ops.derivatives import refuse_other_derivatives

ROOMS = {"reference": "lsh_reference", "torch": "lsh_portable", "triton": "lsh_kernels"}
MOST_BUCKETS = 128  # of one set of rotations; more are the product of two sets, or hashing would cost N^2
AT_ONCE = {"cpu": 2**18, "cuda": 2**26}  # rotated numbers held at a time


def lsh_attention(
    qk: Tensor,
    v: Tensor,
    *,
    n_hashes: int = 1,
    bucket_size: int = 64,
    causal: bool = False,
    key_lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Shared-QK attention of each token to those that hash as it does, in memory and time linear in the length.

    Up to `2 * bucket_size` tokens it is full attention. Scores are scaled by 1 / sqrt(D).

    Args:
        qk: (B, H, N, D), D from 8 to 256; float32, float16, bfloat16 or float64. Queries as they are, keys at length 1.
            Under autocast, cast to its dtype.
        v: (B, H, N, D), of the same dtype.
        n_hashes: rounds of hashing, each with rotations of its own: more of them find more of what full attention sees.
        bucket_size: tokens in a chunk; there are about N / bucket_size buckets.
        causal: a token sees none at a later position. Beyond `2 * bucket_size` tokens later ones still decide, as in
            the paper, where chunks end in the sorted sequence, and so which of the earlier ones it sees.
        key_lengths: (B,) integers: only the first so many tokens of each sequence are seen. The others see what the
            last chunks hold; they change nothing for the rest, but must be finite.
        generator: draws the rotations, on its own device; torch's generator of qk's device by default.

    Returns:
        (B, H, N, D) in the dtype of qk. A row that sees nothing, not even itself, gives 0 and no gradient.

    Raises ValueError where arguments do not fit each other.
    """
    if isinstance(qk, Tensor) and torch.is_autocast_enabled(qk.device.type) and qk.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(qk.device.type)
        qk, v = qk.to(dtype), v.to(dtype)
    refuse_other_derivatives("lsh_attention", qk, v)
    _check(qk, v, n_hashes, bucket_size, causal, generator)
    batch, heads, length, size = qk.shape
    if key_lengths is not None:
        key_lengths = _integers("key_lengths", key_lengths, (batch,), qk.device).clamp(0, length).to(torch.int32)
    sets = bucket_sets(length, bucket_size)
    rounds = n_hashes if sets else 1  # in one chunk all rounds would be the same
    shape = heads, size, rounds, sum(sets) // 2
    if generator is None:  # named at all, it would fix the shape of a compiled graph
        rotations = torch.randn(shape, device=qk.device)
    else:
        rotations = torch.randn(shape, generator=generator, device=generator.device).to(qk.device)
    out, _, _ = torch.ops.lean_arch.lsh_attention(
        qk, v, rotations, key_lengths, bucket_size, causal, _backend(qk.device)
    )
    return out


def chunk_size(length: int, bucket_size: int) -> int:
    return length if length <= 2 * bucket_size else bucket_size


def bucket_sets(length: int, bucket_size: int) -> tuple[int, ...]:
    """How many buckets each set of rotations tells apart, all even; their product is about length / bucket_size."""
    if chunk_size(length, bucket_size) == length:
        return ()
    number = 2 * max((length + bucket_size) // (2 * bucket_size), 1)
    if number <= MOST_BUCKETS:
        return (number,)
    first = 2 * int(math.sqrt(number) / 2)
    return first, 2 * (number // (2 * first))


def at_once(qk: Tensor, numbers: int) -> tuple[int, int]:
    """(heads, tokens of each) that are hashed together; `numbers` come of a token."""
    most, length = AT_ONCE.get(qk.device.type, AT_ONCE["cuda"]), qk.shape[2]
    return max(most // max(length * numbers, 1), 1), max(most // max(numbers, 1), 1)


def sort_tokens(qk: Tensor, rotations: Tensor, key_lengths: Tensor | None, sets: tuple[int, ...]) -> Tensor:
    """The order (B, H, R, N) int32: by bucket, then position; tokens beyond the key lengths come last."""
    batch, heads, length, _ = qk.shape
    rounds = rotations.shape[2]
    order = qk.new_empty(batch, heads, rounds, length, dtype=torch.int32)
    rotations = rotations.to(arithmetic(qk.dtype)).flatten(2)
    heads_at_once, rows = at_once(qk, rotations.shape[2])
    for b in range(batch):
        for start in range(0, heads, heads_at_once):
            some = slice(start, start + heads_at_once)
            parts = qk[b, some].split(rows, 1)
            buckets = torch.cat([_buckets(x.to(rotations.dtype) @ rotations[some], rounds, sets) for x in parts], 2)
            if key_lengths is not None:
                beyond = torch.arange(length, device=qk.device) >= key_lengths[b]
                buckets.masked_fill_(beyond, math.prod(sets))
            order[b, some] = buckets.sort(stable=True).indices.int()
            del buckets  # before the next are found
    return order


def _buckets(rotated: Tensor, rounds: int, sets: tuple[int, ...]) -> Tensor:
    """(heads, R, n) int32 from rotated (heads, n, R * K): the place of the largest of [x, -x] in each set."""
    rotated = rotated.unflatten(-1, (rounds, -1))
    buckets = torch.zeros(rotated.shape[:-1], dtype=torch.int32, device=rotated.device)
    for number, x in zip(sets, rotated.split([number // 2 for number in sets], -1)):
        place = x.abs().argmax(-1, keepdim=True)
        opposite = (x.gather(-1, place) < 0) * (number // 2)
        buckets = buckets * number + (place + opposite).squeeze(-1)
    return buckets.transpose(1, 2)


def forward_scratch(qk: Tensor, rotations: Tensor, key_lengths: Tensor | None, bucket_size: int, causal: bool) -> int:
    """Bytes that the operator takes beside its results, by backend "torch"."""
    chunk, results = chunk_size(qk.shape[2], bucket_size), qk.numel() * qk.element_size() + _row_bytes(qk)
    own = lsh_portable.scratch_bytes(qk, rotations.shape[2], key_lengths, chunk, causal, backward=False)
    return max(own, _sort_bytes(qk, rotations) - results)


def backward_scratch(qk: Tensor, rounds: int, key_lengths: Tensor | None, bucket_size: int, causal: bool) -> int:
    """Bytes that the operator's backward takes beside its results, by backend "torch"."""
    chunk, results = chunk_size(qk.shape[2], bucket_size), 2 * qk.numel() * qk.element_size()
    own = lsh_portable.scratch_bytes(qk, rounds, key_lengths, chunk, causal, backward=True)
    return max(_row_bytes(qk) + own, products_bytes(qk) - results)


def _row_bytes(qk: Tensor) -> int:
    """Of a number for each row."""
    return qk.shape[:3].numel() * arithmetic(qk.dtype).itemsize


def _sort_bytes(qk: Tensor, rotations: Tensor) -> int:
    """What `sort_tokens` takes beside its result."""
    _, heads, length, size = qk.shape
    rounds, numbers = rotations.shape[2], rotations[0, 0].numel()
    some, rows = at_once(qk, numbers)
    some, rows, dtype = min(some, heads), min(rows, length), arithmetic(qk.dtype)
    rotated, part, whole = dtype.itemsize * some * rows * numbers, some * rows * rounds, some * length * rounds
    turned = rotations.numel() * dtype.itemsize if rotations.dtype != dtype else 0
    widened = dtype.itemsize * some * rows * size if qk.dtype != dtype else 0
    hashing = 8 * (whole - part) + rotated + max(widened, rotated + 12 * part, 48 * part)
    return turned + max(hashing, 28 * whole)


def _check(qk, v, n_hashes, bucket_size, causal, generator):
    for name, tensor in (("qk", qk), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor (batch, heads, length, head size), got {found}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; float32, float16, bfloat16 and float64 work")
    if v.shape != qk.shape:
        raise ValueError(f"v is {tuple(v.shape)} but qk is {tuple(qk.shape)}; they must have the same shape")
    if v.dtype != qk.dtype or v.device != qk.device:
        raise ValueError(f"v is {v.dtype} on {v.device}, but qk is {qk.dtype} on {qk.device}")
    if not HEAD_SIZES.start <= qk.shape[3] < HEAD_SIZES.stop:  # `in` would end a dynamic graph
        raise ValueError(f"head size {qk.shape[3]} of qk is not supported; 8 to 256 are")
    if qk.shape[1] == 0 or qk.shape[2] == 0:
        raise ValueError(f"qk is {tuple(qk.shape)}; it takes one or more heads and tokens")
    for name, value in (("n_hashes", n_hashes), ("bucket_size", bucket_size)):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ValueError(f"{name} {value!r} must be a whole number, 1 or more")
    if not isinstance(causal, bool):
        raise ValueError(f"causal {causal!r} must be True or False")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator {generator!r} must be a torch.Generator or None")


def _room(backend: str):
    return importlib.import_module(f"lean_arch.ops.attention.{ROOMS[backend]}")


@torch.library.custom_op("lean_arch::lsh_attention", mutates_args=())
def _forward(
    qk: Tensor,
    v: Tensor,
    rotations: Tensor,
    key_lengths: Tensor | None,
    bucket_size: int,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(qk.device.type, enabled=False):
        order = sort_tokens(qk, rotations, key_lengths, bucket_sets(qk.shape[2], bucket_size))
        chunk = chunk_size(qk.shape[2], bucket_size)
        out, lse = _room(backend).forward(qk, v, order, key_lengths, chunk, causal)
    return out, lse, order


@_forward.register_fake
def _(qk, v, rotations, key_lengths, bucket_size, causal, backend):
    batch, heads, length, _ = qk.shape
    order = qk.new_empty((batch, heads, rotations.shape[2], length), dtype=torch.int32)
    return torch.empty_like(qk), qk.new_empty(qk.shape[:3], dtype=arithmetic(qk.dtype)), order


@torch.library.custom_op("lean_arch::lsh_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    qk: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    order: Tensor,
    key_lengths: Tensor | None,
    bucket_size: int,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    with torch.autocast(qk.device.type, enabled=False):
        delta, chunk = row_products(grad_out, out), chunk_size(qk.shape[2], bucket_size)
        return _room(backend).backward(grad_out, delta, qk, v, lse, order, key_lengths, chunk, causal)


@_backward.register_fake
def _(grad_out, qk, v, *others):
    return torch.empty_like(qk), torch.empty_like(v)


def _remember(ctx, inputs, output):
    qk, v, _, key_lengths, *ctx.options = inputs
    out, lse, order = output
    ctx.mark_non_differentiable(lse, order)
    ctx.save_for_backward(qk, v, out, lse, order, key_lengths)


def _differentiate(ctx, grad_out, *_):
    grads = torch.ops.lean_arch.lsh_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *grads, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx, *grads):
    raise RuntimeError("lsh_attention cannot be differentiated twice")


_backward.register_autograd(_refuse)


@register_flop_formula(torch.ops.lean_arch.lsh_attention)
def _forward_flops(qk_shape, v_shape, rotations_shape, lengths_shape, bucket_size, *others, out_shape=None) -> int:
    """The rotations, and two products: scores and results."""
    rounds, numbers = rotations_shape[2:]
    hashing = 2 * math.prod(qk_shape) * rounds * numbers
    return hashing + 2 * _product_flops(qk_shape, rounds, bucket_size)


@register_flop_formula(torch.ops.lean_arch.lsh_attention_backward)
def _backward_flops(grad_shape, qk_shape, *others, out_shape=None) -> int:
    """Five: scores again, gradients of weights, queries, keys and values."""
    order_shape, _, bucket_size = others[3:6]
    return 5 * _product_flops(qk_shape, order_shape[2], bucket_size)


def _product_flops(shape, rounds: int, bucket_size: int) -> int:
    """Of each token with the window of its chunk; the first chunk, which looks nowhere else, counts as the others."""
    chunk = chunk_size(shape[2], bucket_size)
    window = chunk if chunk == shape[2] else 2 * chunk
    return 2 * math.prod(shape) * rounds * window
