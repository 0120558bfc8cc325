"""Which query may see which key: a small algebra of attention patterns.

    pattern = (local(256) | global_tokens(64)) & causal()

Positions count along the keys: query row r of Nq sits at position i = r + Nk - Nq, so the last query sits at the last
key (as in FlashAttention). A pattern answers two questions, about a rectangle of positions and about single ones; a
mask of all Nq x Nk pairs is never made. Local, Longformer (Beltagy et al. 2020, arXiv 2004.05150), BigBird (Zaheer et
al. 2020, arXiv 2007.14062) and strided (Child et al. 2019, arXiv 1904.10509) attention are patterns.
"""

import dataclasses
import functools
import hashlib
import operator
import weakref

import torch
from torch import Tensor

living_masks = weakref.WeakValueDictionary()  # text -> the FromMask spelled so
NONE, SOME, ALL = 0, 1, 2  # of the pairs in a rectangle may see each other


@dataclasses.dataclass(frozen=True)
class Span:
    """The positions of some tiles: both ends of each included. Tensors of int64 that broadcast."""

    first: Tensor
    last: Tensor


class Pattern:
    """What `|` (either allows it) and `&` (both do) make of two patterns is one too. Equal patterns are the same."""

    def allows(self, i: Tensor, j: Tensor, nq: int, nk: int) -> Tensor:
        """For positions of queries `i` and keys `j` (int64, broadcast): bool, True where i may see j."""
        raise NotImplementedError

    def cover(self, i: Span, j: Span, nq: int, nk: int) -> Tensor:
        """For rectangles of positions: int8 NONE, SOME or ALL. SOME is always right, only slower."""
        raise NotImplementedError

    def check(self, nq: int, nk: int) -> None:
        """Raises ValueError when the pattern is not one for `nq` queries and `nk` keys."""

    def __or__(self, other: "Pattern") -> "Pattern":
        return Union(self, _pattern(other))

    def __and__(self, other: "Pattern") -> "Pattern":
        return Intersection(self, _pattern(other))

    def mask(self, nq: int, nk: int | None = None) -> Tensor:
        """All pairs as a bool tensor (Nq, Nk), True = may see: to look at and to test with, for it is large."""
        nq, nk = _lengths(nq, nk)
        self.check(nq, nk)
        return self.allows(torch.arange(nq)[:, None] + nk - nq, torch.arange(nk)[None], nq, nk).expand(nq, nk)

    def density(self, nq: int, nk: int | None = None) -> float:
        """Share of the Nq x Nk pairs that are computed: those of all tiles that any pair of the pattern lies in."""
        from lean_arch.ops.attention.tiles import compile_tiles  # that module stands on this one

        nq, nk = _lengths(nq, nk)
        tiles = compile_tiles(self, nq, nk)
        return tiles.area / (nq * nk)

    def show(self, nq: int, nk: int | None = None, axes=None):
        """Draws the pattern, queries down and keys across, and returns matplotlib's axes."""
        from matplotlib.figure import Figure  # takes a second that only a drawing should cost

        axes = axes or Figure(layout="constrained").add_subplot()
        axes.imshow(self.mask(nq, nk), cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        axes.set(xlabel="key", ylabel="query", title=str(self))
        return axes


def _lengths(nq: int, nk: int | None) -> tuple[int, int]:
    return _count("nq", nq, 1), _count("nk", nq if nk is None else nk, 1)


def _pattern(thing) -> Pattern:
    if not isinstance(thing, Pattern):
        raise TypeError(f"pattern {thing!r} cannot be joined with | or &; local(256) or causal() can")
    return thing


@dataclasses.dataclass(frozen=True)
class Union(Pattern):
    left: Pattern
    right: Pattern

    def allows(self, i, j, nq, nk):
        return self.left.allows(i, j, nq, nk) | self.right.allows(i, j, nq, nk)

    def cover(self, i, j, nq, nk):
        return torch.maximum(self.left.cover(i, j, nq, nk), self.right.cover(i, j, nq, nk))

    def check(self, nq, nk):
        self.left.check(nq, nk), self.right.check(nq, nk)

    def __str__(self):
        return f"({self.left} | {self.right})"


@dataclasses.dataclass(frozen=True)
class Intersection(Pattern):
    left: Pattern
    right: Pattern

    def allows(self, i, j, nq, nk):
        return self.left.allows(i, j, nq, nk) & self.right.allows(i, j, nq, nk)

    def cover(self, i, j, nq, nk):
        return torch.minimum(self.left.cover(i, j, nq, nk), self.right.cover(i, j, nq, nk))

    def check(self, nq, nk):
        self.left.check(nq, nk), self.right.check(nq, nk)

    def __str__(self):
        return f"({self.left} & {self.right})"


def _grade(some: Tensor, every: Tensor) -> Tensor:
    return some.to(torch.int8) + (some & every).to(torch.int8)


@dataclasses.dataclass(frozen=True)
class Dense(Pattern):
    def allows(self, i, j, nq, nk):
        return (i == i) & (j == j)

    def cover(self, i, j, nq, nk):
        return torch.full(torch.broadcast_shapes(i.first.shape, j.first.shape), ALL, dtype=torch.int8)

    def __str__(self):
        return "dense()"


@dataclasses.dataclass(frozen=True)
class Band(Pattern):
    """Keys from `left` before the query to `right` after it; None: no limit on that side."""

    left: int | None
    right: int | None

    def allows(self, i, j, nq, nk):
        far = nq + nk
        return (j - i <= _or(self.right, far)) & (i - j <= _or(self.left, far))

    def cover(self, i, j, nq, nk):
        left, right = (_or(side, nq + nk) for side in (self.left, self.right))
        some = (j.first - i.last <= right) & (i.first - j.last <= left)
        return _grade(some, (j.last - i.first <= right) & (i.last - j.first <= left))

    def __str__(self):
        return "causal()" if (self.left, self.right) == (None, 0) else f"local({self.left}, {self.right})"


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


@dataclasses.dataclass(frozen=True)
class GlobalTokens(Pattern):
    """Tokens that see all keys and that all queries see; `at`: their number from the start, or their positions."""

    at: int | tuple[int, ...]

    def _counts(self, nk) -> Tensor:
        """How many of the positions below 0, 1, ... nk are global."""
        chosen = torch.zeros(nk + 1, dtype=torch.int64)
        if isinstance(self.at, int):
            chosen[1 : self.at + 1] = 1
        else:
            chosen[torch.tensor(self.at, dtype=torch.int64) + 1] = 1
        return chosen.cumsum(0)

    def _chosen(self, at, nk) -> Tensor:
        counts, inside = self._counts(nk), (at >= 0) & (at < nk)
        at = at.clamp(0, nk - 1)
        return inside & (counts[at + 1] > counts[at])

    def allows(self, i, j, nq, nk):
        return self._chosen(i, nk) | self._chosen(j, nk)

    def cover(self, i, j, nq, nk):
        counts = self._counts(nk)

        def within(span):
            first, end = span.first.clamp(0, nk), (span.last + 1).clamp(0, nk)
            number = counts[end] - counts[first]
            return number > 0, number == span.last - span.first + 1

        (some_i, all_i), (some_j, all_j) = within(i), within(j)
        return _grade(some_i | some_j, all_i | all_j)

    def check(self, nq, nk):
        if not isinstance(self.at, int) and self.at and max(self.at) >= nk:
            raise ValueError(f"global_tokens position {max(self.at)} is beyond the {nk} keys; 0 to {nk - 1} work")

    def __str__(self):
        return f"global_tokens({self.at if isinstance(self.at, int) else list(self.at)})"


@dataclasses.dataclass(frozen=True)
class RandomBlocks(Pattern):
    """Each block of queries sees `count` blocks of keys, drawn from `seed`."""

    count: int
    block: int
    seed: int

    def _table(self, nq, nk) -> tuple[Tensor, int]:
        """(which block of queries sees which block of keys, number of the first block of queries)."""
        return _draw_blocks(self.count, self.block, self.seed, nq, nk)

    def allows(self, i, j, nq, nk):
        table, first = self._table(nq, nk)
        return table[i // self.block - first, (j // self.block).clamp(max=table.shape[1] - 1)]

    def cover(self, i, j, nq, nk):
        table, first = self._table(nq, nk)
        counts = torch.nn.functional.pad(table.long().cumsum(0).cumsum(1), (1, 0, 1, 0))
        rows, columns = table.shape
        top, bottom = (i.first // self.block - first).clamp(0, rows), (i.last // self.block - first + 1).clamp(0, rows)
        left, right = (j.first // self.block).clamp(0, columns), (j.last // self.block + 1).clamp(0, columns)
        number = counts[bottom, right] - counts[top, right] - counts[bottom, left] + counts[top, left]
        return _grade(number > 0, number == (bottom - top) * (right - left))

    def __str__(self):
        return f"random_blocks({self.count}, block={self.block}, seed={self.seed})"


@functools.lru_cache(64)
def _draw_blocks(count: int, block: int, seed: int, nq: int, nk: int) -> tuple[Tensor, int]:
    first, last, columns = (nk - nq) // block, (nk - 1) // block, -(-nk // block)
    table = torch.zeros(last - first + 1, columns, dtype=torch.bool)
    for row in range(len(table)):
        generator = torch.Generator().manual_seed(hash((seed, row + first, columns)) % 2**63)
        table[row, torch.randperm(columns, generator=generator)[:count]] = True
    return table, first


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    stride: int

    def allows(self, i, j, nq, nk):
        return (i - j) % self.stride == 0

    def cover(self, i, j, nq, nk):
        low, high = i.first - j.last, i.last - j.first  # all the differences between them occur
        some = torch.div(high, self.stride, rounding_mode="floor") * self.stride >= low
        return _grade(some, (low == high) | (torch.tensor(self.stride) == 1))

    def __str__(self):
        return f"strided({self.stride})"


@dataclasses.dataclass(frozen=True)
class Chunks(Pattern):
    """Consecutive chunks of `size`: each sees itself and the `back` chunks before it."""

    size: int
    back: int

    def allows(self, i, j, nq, nk):
        step = i // self.size - j // self.size
        return (step >= 0) & (step <= self.back)

    def cover(self, i, j, nq, nk):
        low, high = i.first // self.size - j.last // self.size, i.last // self.size - j.first // self.size
        return _grade((high >= 0) & (low <= self.back), (low >= 0) & (high <= self.back))

    def __str__(self):
        return f"chunks({self.size}, back={self.back})"


@dataclasses.dataclass(frozen=True, eq=False)
class FromMask(Pattern):
    """bits (Nq, Nk / 8) uint8, the first key in the lowest bit; `digest` of them tells masks apart."""

    bits: Tensor
    shape: tuple[int, int]
    digest: str

    @staticmethod
    def of(bits: Tensor, shape: tuple[int, int]) -> "FromMask":
        """The one pattern of these bits, also when copied or pickled."""
        pattern = FromMask(bits, shape, hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:32])
        return living_masks.setdefault(str(pattern), pattern)

    def __reduce__(self):
        return FromMask.of, (self.bits, self.shape)

    def allows(self, i, j, nq, nk):
        return ((self.bits[i - (nk - nq), j >> 3] >> (j & 7)) & 1).bool()

    def cover(self, i, j, nq, nk):
        """Looks at squares of 8 x 8 pairs only."""
        counts, ends = self._counts, []
        for first, last in ((i.first - (nk - nq), i.last - (nk - nq)), (j.first, j.last)):
            ends.append((first.clamp(min=0) >> 3, (last >> 3) + 1))
        (top, bottom), (left, right) = ends
        number = counts[bottom, right] - counts[top, right] - counts[bottom, left] + counts[top, left]
        rows, columns = (bottom << 3).clamp(max=nq) - (top << 3), (right << 3).clamp(max=nk) - (left << 3)
        return _grade(number > 0, number == rows * columns)

    @functools.cached_property
    def _counts(self) -> Tensor:
        """How many pairs lie in all the squares above and to the left of each corner."""
        nq, columns = self.bits.shape
        squares = torch.zeros(-(-nq // 8), columns, dtype=torch.int64)
        for bit in range(8):
            ones = torch.nn.functional.pad((self.bits >> bit) & 1, (0, 0, 0, -nq % 8))
            squares += ones.view(-1, 8, columns).sum(1)
        return torch.nn.functional.pad(squares.cumsum(0).cumsum(1), (1, 0, 1, 0))

    def check(self, nq, nk):
        if self.shape != (nq, nk):
            raise ValueError(f"pattern from_mask is {self.shape}, but there are {nq} queries and {nk} keys")

    def __str__(self):
        return f"from_mask({self.shape[0]}, {self.shape[1]}, digest={self.digest!r})"


def dense() -> Pattern:
    """Every query sees every key."""
    return Dense()


def causal() -> Pattern:
    """A query sees the keys up to its own position."""
    return Band(None, 0)


def local(left: int, right: int | None = None) -> Pattern:
    """A query sees the `left` keys before its position, its own, and the `right` (default: as many) after it."""
    right = left if right is None else right
    return Band(_count("local left", left, 0), _count("local right", right, 0))


def global_tokens(which: int | Tensor | list[int]) -> Pattern:
    """The first `which` positions, or those in an index tensor: everyone sees them, and they see everything."""
    if isinstance(which, int) and not isinstance(which, bool):
        return GlobalTokens(_count("global_tokens", which, 0))
    at = which.flatten().tolist() if isinstance(which, Tensor) else list(which)
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in at):
        raise ValueError(
            f"global_tokens {at} must be positions, whole numbers from 0; those of a mask are mask.nonzero()"
        )
    return GlobalTokens(tuple(sorted(set(at))))


def random_blocks(count: int, block: int = 64, seed: int = 0) -> Pattern:
    """Each block of `block` queries sees `count` blocks of keys, drawn from `seed` (all, where there are fewer)."""
    numbers = {"count": (count, 1), "block": (block, 1), "seed": (seed, 0)}
    return RandomBlocks(*(_count(f"random_blocks {name}", *number) for name, number in numbers.items()))


def strided(stride: int) -> Pattern:
    """A query sees the keys whose distance is a multiple of `stride`, on both sides."""
    return Strided(_count("strided", stride, 1))


def from_mask(mask: Tensor) -> Pattern:
    """What a bool tensor (Nq, Nk) says, True = may see; for that many queries and keys only."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"from_mask takes a bool tensor (Nq, Nk), got {found}")
    columns = torch.nn.functional.pad(mask.detach().cpu(), (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8))
    bits = (columns << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return FromMask.of(bits, tuple(mask.shape))


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= operator.index(value) < 2**62:
        raise ValueError(f"{name} {value!r} must be a whole number, {least} or more and below 2**62")
    return operator.index(value)
