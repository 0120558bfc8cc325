"""LSH attention by PyTorch's own operators: chunks in groups, and nothing held of a group when the next one comes.

The chunks of a round lie one after another, those of several heads where these are short, and each sees a window: the
chunk before it and itself. Windows are a view in which rows occur twice, so a group of chunks is a handful of batched
products. Rows are read from where they lie and summed, in float32, for a block of heads at a time.

Backward, with P = exp(S - lse) of the softmax over all rounds: dV = P^T dO, dS = P (dO V^T - delta), dQ = scale dS K,
dK = scale dS^T Q, and through the keys' length d(x / |x|) = (dK - K (K . dK)) / |x|.

Shapes: qk, v, out (B, H, N, D); lse, delta (B, H, N); order (B, H, R, N). Rows of a block are numbered h * N + position
for its heads h; one row more stands for all that is not there. In a group: c chunks of n rows, windows of w = 2 n rows
(w = n where there is but one chunk).
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from lean_arch.ops.attention.problem import arithmetic

SCORES = {"cpu": 2**21, "cuda": 2**26}  # held at a time: fewer take more calls, more leave a CPU's caches


def forward(
    qk: Tensor, v: Tensor, order: Tensor, key_lengths: Tensor | None, bucket_size: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out in qk's dtype, lse in float32 or float64: -inf where a token sees no other, whose out is its own value)."""
    out, lse = torch.empty_like(qk), qk.new_empty(qk.shape[:3], dtype=arithmetic(qk.dtype))
    for block in blocks(order, key_lengths, bucket_size):
        attend(block, qk, v, out, lse, causal)
    return out, lse


def attend(block: "Block", qk: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> None:
    """Writes out and lse of one block. The softmax is kept up over groups and rounds (Milakov & Gimelshein 2018,
    arXiv 1805.02867)."""
    tokens, values, dtype = Rows(qk), Rows(v), lse.dtype
    x_at, v_at = tokens.numbers(block), values.numbers(block)
    sums = qk.new_zeros(block.rows + 1, qk.shape[3], dtype=dtype)
    total = qk.new_zeros(block.rows + 1, dtype=dtype)
    top = torch.full_like(total, torch.finfo(dtype).min)
    for group in block.groups():
        x = tokens.take(x_at[group.rows], dtype)
        weights = group.scores(x, normalized(x)[0], causal)
        del x
        before, at = top[group.own], group.own
        top[at] = level = torch.maximum(weights.amax(-1).flatten(), before)
        weights.sub_(level.view(*weights.shape[:2], 1)).exp_()
        shrink = before.sub_(level).exp_()
        total[at] = total[at].mul_(shrink).add_(weights.sum(-1).flatten())
        seen = torch.bmm(weights, group.windows(values.take(v_at[group.rows], dtype)))
        del weights
        sums[at] = seen.flatten(0, 1).addcmul_(sums.index_select(0, at), shrink[:, None])
        del group, at, seen
    lses = (total.log() + top)[:-1].view(block.heads, -1)
    sums.div_(total.masked_fill_(total == 0, 1.0)[:, None])
    for i, (b, h) in enumerate(block.places):
        lse[b, h] = lses[i]
        out[b, h] = torch.where(block.alone(i, lses[i])[:, None], v[b, h], block.of(sums, i))


def backward(
    grad_out: Tensor,
    delta: Tensor,
    qk: Tensor,
    v: Tensor,
    lse: Tensor,
    order: Tensor,
    key_lengths: Tensor | None,
    bucket_size: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """(dqk, dv), from delta (B, H, N) = sum(grad_out * out, -1)."""
    results = torch.empty_like(qk), torch.empty_like(v)
    for block in blocks(order, key_lengths, bucket_size):
        differentiate(block, grad_out, delta, qk, v, lse, *results, causal)
    return results


def differentiate(
    block: "Block",
    grad_out: Tensor,
    delta: Tensor,
    qk: Tensor,
    v: Tensor,
    lse: Tensor,
    grad_qk: Tensor,
    grad_v: Tensor,
    causal: bool,
) -> None:
    """Writes dqk and dv of one block."""
    tokens, values, grads, dtype = Rows(qk), Rows(v), Rows(grad_out), lse.dtype
    x_at, v_at, g_at = tokens.numbers(block), values.numbers(block), grads.numbers(block)
    debts = pad(torch.stack([delta[b, h] for b, h in block.places]).flatten(), (0, 1))
    lses = torch.stack([lse[b, h] for b, h in block.places])
    levels = pad(lses.masked_fill(lses == -math.inf, math.inf).flatten(), (0, 1), value=math.inf)
    sums_qk = qk.new_zeros(block.rows + 1, qk.shape[3], dtype=dtype)
    sums_v, scale = torch.zeros_like(sums_qk), 1 / math.sqrt(qk.shape[3])
    for group in block.groups():
        x = tokens.take(x_at[group.rows], dtype)
        k, shrink = normalized(x)
        weights = group.scores(x, k, causal, levels[group.own]).exp_()
        g = group.chunks(grads.take(g_at[group.own], dtype))
        seen = group.windows(values.take(v_at[group.rows], dtype))
        slopes = torch.baddbmm(group.chunks(debts[group.own, None]), g, seen.mT, beta=-1).mul_(weights)
        del seen
        add_rows(sums_v, group.rows, group.fold(weights, g))
        del weights, g
        grad = group.fold(slopes, group.chunks(group.last(x)), scale)
        grad.addcmul_(k, (grad * k).sum(-1, keepdim=True), value=-1).mul_(shrink)
        group.chunks(group.last(grad)).baddbmm_(slopes, group.windows(k), alpha=scale)
        del x, k, slopes
        add_rows(sums_qk, group.rows, grad)
        del group, grad
    for i, (b, h) in enumerate(block.places):
        grad_qk[b, h] = block.of(sums_qk, i)
        alone = block.alone(i, lses[i])[:, None]
        grad_v[b, h] = block.of(sums_v, i).add_(grad_out[b, h].where(alone, 0.0))


def normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x at length 1, 1 / its length). A row of zeros stays one, and nothing flows back through its length."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = length.reciprocal().masked_fill_(length < torch.finfo(x.dtype).tiny, 0.0)
    return x * inverse, inverse


def add_rows(sums: Tensor, rows: Tensor, x: Tensor) -> None:
    """sums[rows] += x for rows that differ (all but the one for what is not there), faster than index_add_."""
    sums[rows] = x.add_(sums.index_select(0, rows))


class Rows:
    """The rows of x (B, H, N, D), wherever they lie, as a table that is a view of it."""

    def __init__(self, x: Tensor):
        *self.steps, column = x.stride()
        sizes = x.shape[:3]
        unit = math.gcd(*(step for step, size in zip(self.steps, sizes) if size > 1)) or 1
        self.steps = [step // unit for step in self.steps]
        count = 1 + sum(step * (size - 1) for step, size in zip(self.steps, sizes))
        self.table = x.as_strided((count, x.shape[3]), (unit, column))

    def numbers(self, block: "Block") -> Tensor:
        """Where the rows of a block are in the table; for what is not there any row will do."""
        batch, head, row = self.steps
        firsts = torch.tensor([b * batch + h * head for b, h in block.places], device=self.table.device)
        steps = torch.arange(block.length, device=self.table.device) * row
        return pad((firsts[:, None] + steps).flatten(), (0, 1))

    def take(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return self.table.index_select(0, numbers).to(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """rows ((c + back) n): of its keys, in their order; own (c n): of its queries, the last of them. at (c, n) and
    window_at (c, w): positions of queries and of the keys they see, N for a key that nobody sees."""

    rows: Tensor
    own: Tensor
    at: Tensor
    window_at: Tensor
    length: int

    def last(self, x: Tensor) -> Tensor:
        return x[len(self.rows) - len(self.own) :]

    def chunks(self, x: Tensor) -> Tensor:
        return x.view(*self.at.shape, -1)

    def windows(self, x: Tensor) -> Tensor:
        """(c, w, D) of rows (c n + w - n, D), without a copy."""
        size = self.at.shape[1] * x.shape[1]
        return x.as_strided((*self.window_at.shape, x.shape[1]), (size, x.shape[1], 1))

    def scores(self, x: Tensor, k: Tensor, causal: bool, levels: Tensor | None = None) -> Tensor:
        """(c, n, w), less the levels of their rows; -inf where a query does not see a key, and for itself."""
        start, beta = (x.new_empty(1, 1, 1), 0) if levels is None else (self.chunks(levels[:, None]), -1)
        queries, scale = self.chunks(self.last(x)), 1 / math.sqrt(x.shape[1])
        scores = torch.baddbmm(start, queries, self.windows(k).mT, beta=beta, alpha=scale)
        if causal:
            return scores.masked_fill_(self.window_at[:, None] >= self.at[..., None], -math.inf)
        chunk, window = scores.shape[1:]
        scores.diagonal(window - chunk, 1, 2).fill_(-math.inf)
        return scores.masked_fill_((self.window_at == self.length)[:, None], -math.inf)

    def fold(self, weights: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
        """scale * weights^T x for x (c, n, D): rows ((c + back) n, D), a window's rows added where windows overlap."""
        chunk, window = weights.shape[1:]
        sums = x.new_zeros(len(self.rows) // chunk, chunk, x.shape[2])
        for start in range(0, window, chunk):
            part = sums[start // chunk :][: len(x)]
            part.baddbmm_(weights[..., start : start + chunk].mT, x, alpha=scale)
        return sums.flatten(0, 1)


class Block:
    """Some heads, all of whose rounds are gone through before the next ones come."""

    def __init__(
        self, places: list[tuple[int, int]], order: Tensor, key_lengths: Tensor | None, bucket_size: int, room: int
    ):
        self.places, self.order, self.heads, self.room = places, order, len(places), room
        self.length = order.shape[-1]
        self.rows = self.heads * self.length
        self.chunk = min(bucket_size, self.length)
        self.ends = None if key_lengths is None else key_lengths[[b for b, _ in places]]

    def of(self, sums: Tensor, i: int) -> Tensor:
        return sums[i * self.length : (i + 1) * self.length]

    def alone(self, i: int, lse: Tensor) -> Tensor:
        """Which tokens of the i-th head see themselves only."""
        alone = lse == -math.inf
        return alone if self.ends is None else alone & (torch.arange(self.length, device=lse.device) < self.ends[i])

    def groups(self) -> Iterator[Group]:
        length, chunk = self.length, self.chunk
        number = -(-length // chunk)
        back = chunk if number > 1 else 0
        most = max(self.room // (chunk * (chunk + back)), 1)
        offsets = torch.arange(self.heads, device=self.order.device)[:, None] * length
        for order in self.order.unbind(1):
            at = pad(order, (0, number * chunk - length), value=length)
            rows = pad((at + offsets).masked_fill_(at == length, self.rows).flatten(), (back, 0), value=self.rows)
            key_at = at if self.ends is None else at.masked_fill(at >= self.ends[:, None], length)
            windows = pad(key_at.flatten(), (back, 0), value=length).unfold(0, chunk + back, chunk).contiguous()
            windows.view(self.heads, number, -1)[:, 0, :back] = length  # the chunk before is another head's
            at = at.view(-1, chunk)
            for start in range(0, len(at), most):
                stop = min(start + most, len(at))
                own = slice(start * chunk + back, stop * chunk + back)
                yield Group(
                    rows[start * chunk : stop * chunk + back], rows[own], at[start:stop], windows[start:stop], length
                )


def at_once(batch: int, heads: int, length: int, bucket_size: int, device: torch.device) -> tuple[int, int]:
    """(heads of a block, scores of a group)."""
    room = min(SCORES.get(device.type, SCORES["cuda"]), 32 * batch * heads * length)  # short ones take less
    return max(min(room // max(2 * min(bucket_size, length) * length, 1), batch * heads), 1), room


def blocks(order: Tensor, key_lengths: Tensor | None, bucket_size: int) -> Iterator[Block]:
    batch, heads, _, length = order.shape
    places = [(b, h) for b in range(batch) for h in range(heads)]
    most, room = at_once(batch, heads, length, bucket_size, order.device)
    for some in (places[start : start + most] for start in range(0, len(places), most)):
        yield Block(some, torch.stack([order[b, h] for b, h in some]), key_lengths, bucket_size, room)


def scratch_bytes(
    qk: Tensor, rounds: int, key_lengths: Tensor | None, bucket_size: int, causal: bool, backward: bool
) -> int:
    """What `forward` or `backward` takes beside its results."""
    batch, heads, length, size = qk.shape
    most, room = at_once(batch, heads, length, bucket_size, qk.device)
    chunk, number, dtype = min(bucket_size, length), -(-length // bucket_size), arithmetic(qk.dtype)
    window = chunk * (1 + (number > 1))
    own = max(min(room // (chunk * window), most * number), 1) * chunk
    seen, tokens, padded = own + window - chunk, most * length, most * number * chunk

    # of a block: its order and where its rows lie; sums, and two numbers for each of its tokens
    held = tokens * 4 * rounds + tokens * 8 * (2 + backward)
    held += dtype.itemsize * tokens * ((size + 1) * (1 + backward) + 1)
    # of a round: the order padded, with and without what lengths cut off; rows; windows
    held += padded * (12 + 4 * (key_lengths is not None)) + 4 * padded * window // chunk
    scores = own * window
    if backward:  # weights and slopes; tokens, keys, gradients and two times what is summed
        group = dtype.itemsize * (2 * scores + size * (4 * seen + own) + seen)
    else:  # scores, how far they shrink; their mask, tokens and keys; or values and results
        masked = dtype.itemsize * 2 * seen * size + scores * causal
        group = dtype.itemsize * (scores + 2 * own) + max(masked, dtype.itemsize * size * (seen + own))
    end = length * size * (qk.element_size() if backward else dtype.itemsize * (1 + (qk.dtype != dtype)))
    return held + max(group, end)
