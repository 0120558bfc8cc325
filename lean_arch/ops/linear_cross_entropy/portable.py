"""The loss by PyTorch's operators, tile by tile of (some tokens) x (some of the vocabulary), in bounded scratch.

The vocabulary is the outer loop: the gradient of a stripe of the weight is then whole after one pass over the tokens,
so it is summed in float32 in scratch the size of that stripe and written once. The gradient of x is summed in float32
over all stripes, which for 16-bit x takes (T, D) floats; the other order would take (V, D).

Shapes: x (T, D), weight (V, D), bias (V,), target, coefficient, lse, hit, total (T,); a tile (rows, columns).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS, COLUMNS = 512, 2048  # of a tile on the CPU: 4 MiB, near its caches
AREA_ON_GPU, COLUMNS_ON_GPU = 2**25, 2**13  # large enough to fill one


def tile_size(x: Tensor, weight: Tensor) -> tuple[int, int]:
    """Rows and columns of a tile; of fewer columns than a tile has, more rows fit."""
    area, columns = (ROWS * COLUMNS, COLUMNS) if x.is_cpu else (AREA_ON_GPU, COLUMNS_ON_GPU)
    columns = min(columns, len(weight))
    return max(min(area // columns, len(x)), 1), columns


def slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, dtype: torch.dtype, smooth: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As in reference.py; the products are of numbers of `dtype`. total stays 0 unless `smooth`."""
    lse = x.new_full((len(x),), -torch.inf, dtype=wide(x.dtype))
    hit, total = torch.full_like(lse, torch.nan), torch.zeros_like(lse)
    rows, columns = tile_size(x, weight)
    scratch = x.new_empty(rows * columns, dtype=dtype)
    for stripe in slices(len(weight), columns):
        w = weight[stripe].to(dtype)
        b = None if bias is None else bias[stripe]
        for part in slices(len(x), rows):
            logits = project(x[part].to(dtype), w, b, scratch)
            at, there = locate(target[part] - stripe.start, len(w))
            hit[part] = torch.where(there, logits.gather(1, at)[:, 0], hit[part])
            if smooth:
                total[part] += logits.sum(1)
            top = logits.amax(1).clamp_min(torch.finfo(lse.dtype).min)  # where all are -inf, so is the sum's logarithm
            sums = logits.sub_(top[:, None]).exp_().sum(1)
            lse[part] = torch.logaddexp(lse[part], sums.log_().add_(top))
            del logits
        del w  # before the next is converted
    return lse, hit, total


def project(x: Tensor, w: Tensor, b: Tensor | None, scratch: Tensor) -> Tensor:
    """A tile of logits in wide arithmetic, in `scratch` where that is as wide."""
    logits = torch.mm(x, w.t(), out=scratch[: len(x) * len(w)].view(len(x), len(w))).to(wide(x.dtype))
    return logits if b is None else logits.add_(b)


def locate(target: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Each token's target as a column (rows, 1) of the tile, any where it is not among them, and whether it is."""
    there = (target >= 0) & (target < columns)
    return torch.where(there, target, 0)[:, None], there


def slopes(
    x: Tensor, w: Tensor, b: Tensor | None, lse: Tensor, target: Tensor, smoothing: float, floor: float, scratch: Tensor
) -> Tensor:
    """A tile of d loss / d logits: softmax - (1 - smoothing) one-hot - floor, in x's dtype, in `scratch`."""
    tile = project(x, w, b, scratch).sub_(lse[:, None]).exp_()
    if floor:
        tile.sub_(floor)
    at, there = locate(target, len(w))
    tile.scatter_(1, at, tile.gather(1, at) - (1 - smoothing) * there[:, None].to(tile.dtype))
    return tile if tile.dtype == x.dtype else scratch[: tile.numel()].view(tile.shape).copy_(tile)


def backward(
    coefficient: Tensor,
    lse: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dtype: torch.dtype,
    smoothing: float,
    needs: list[bool],
    slopes=slopes,
) -> list[Tensor | None]:
    """As in reference.py; `slopes` makes a tile. Coefficients never enter a tile: they scale rows of x and of dx."""
    need_x, need_weight, need_bias = needs
    dx = torch.zeros_like(x, dtype=lse.dtype) if need_x else None
    dw = torch.empty_like(weight) if need_weight else None
    db = torch.zeros_like(bias, dtype=lse.dtype) if need_bias else None
    share, unit = coefficient, None
    if dtype == torch.float16:  # whose small numbers a mean over many tokens would fall below
        unit = coefficient.abs().amax().clamp_min(torch.finfo(lse.dtype).tiny)
        share = coefficient / unit
    rows, columns = tile_size(x, weight)
    scratch = x.new_empty(rows * columns, dtype=dtype)
    for stripe in slices(len(weight), columns):
        w = weight[stripe].to(dtype)
        b = None if bias is None else bias[stripe]
        if need_weight:
            whole = dw[stripe] if dw.dtype == lse.dtype else torch.empty_like(w, dtype=lse.dtype)
            whole.zero_()
        for part in slices(len(x), rows):
            near = x[part].to(dtype)
            tile = slopes(
                near, w, b, lse[part], target[part] - stripe.start, smoothing, smoothing / len(weight), scratch
            )
            if need_x:
                add_product(dx[part], tile, w)
            if need_weight:
                add_product(whole, tile.t(), (near * share[part, None]).to(dtype))
            if need_bias:
                db[stripe] += coefficient[part] @ tile.to(lse.dtype)
            del near, tile
        if need_weight:
            dw[stripe] = whole if unit is None else whole * unit
            del whole
        del w
    del scratch
    return [
        dx.mul_(coefficient[:, None]).to(x.dtype) if need_x else None,
        dw,
        db.to(bias.dtype) if need_bias else None,
    ]


def add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    if sums.dtype == a.dtype:
        sums.addmm_(a, b)
    else:
        sums += a @ b


def scratch_bytes(x: Tensor, weight: Tensor, dtype: torch.dtype, needs: list[bool] | None = None) -> int:
    """What the operator takes beside its results (with `needs`: its backward), where every token counts."""
    (tokens, size), sums = x.shape, wide(x.dtype)
    rows, columns = tile_size(x, weight)
    tile, marks = rows * columns * dtype.itemsize, 24 * rows  # whose targets lie in it
    widened, narrow = rows * columns * sums.itemsize, dtype != sums
    stripe = columns * size * dtype.itemsize * (weight.dtype != dtype)
    near = rows * size * dtype.itemsize * (x.dtype != dtype)
    if needs is None:
        tile += stripe + max(near, marks) + narrow * widened
        return tokens * (1 + sums.itemsize) + max(tile, 2 * tokens * sums.itemsize)
    need_x, need_weight, _ = needs
    scaled = rows * size * (sums.itemsize + narrow * dtype.itemsize) * need_weight
    tile += stripe + near + max(narrow * widened, scaled, marks)
    if need_weight and weight.dtype != sums:  # a stripe of its gradient
        tile += columns * size * sums.itemsize
    held = tokens * (1 + sums.itemsize * (1 + (dtype == torch.float16)))
    if not need_x or x.dtype == sums:
        return held + tile
    return held + x.numel() * sums.itemsize + max(tile - x.numel() * x.element_size(), 0)
