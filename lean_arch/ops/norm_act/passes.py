"""The Triton kernels of BatchNorm with an activation: each reads a map once, and rounds once, at its end.

- `norm_statistics`: mean and sum of squares about it, of a stretch of pixels of some channels. Numbers are taken from
  the mean of the stretch's first tile, so that their squares stay in reach of float32 however far the mean is from 0.
  `norm_join` makes one mean and variance of all stretches' (Chan, Golub and LeVeque 1979).
- `norm_act_map`: act((x - mean) * scale + bias), forward and again backward: the same bits both times.
- `norm_act_sums`: of h = grad * act'(u) and of h * normalised x over a stretch; of all stretches, they are the
  gradients of bias and weight.
- `norm_act_gradient`: the gradient of x, written where grad was.

The gradient of the means over planes is added to grad as it is read. There are no atomics, so the same input gives the
same bits.

Shapes as in reference.py, of a map (B, C, P) with P = H * W pixels and its strides; a tile (BLOCK_C, BLOCK_P), or
(BLOCK_P, BLOCK_C) where LAST: channels_last; partial results (stretches, 2, C).
"""

import triton
import triton.language as tl

from lean_arch.ops.depthwise.kernels import tile_of

SIZES = "batch", "images"  # no kernel is built anew for


@triton.jit
def activated(u, ACT: tl.constexpr):
    """act(u); NaN stays NaN."""
    if ACT == "relu":
        u = tl.where(u < 0, 0.0, u)
    elif ACT == "relu6":
        u = tl.where(u < 0, 0.0, tl.where(u > 6, 6.0, u))
    elif ACT == "silu":
        u = u / (1 + tl.exp(-u))
    elif ACT == "gelu":
        u = u * 0.5 * (1 + tl.erf(u * 0.7071067811865476))
    elif ACT == "hardswish":
        u = u * tl.where(u < -3, 0.0, tl.where(u > 3, 6.0, u + 3)) / 6
    return u


@triton.jit
def sloped(g, u, ACT: tl.constexpr):
    """g * act'(u), at a corner as PyTorch has it."""
    if ACT == "relu":
        g = tl.where(u <= 0, 0.0, g)
    elif ACT == "relu6":
        g = tl.where((u <= 0) | (u >= 6), 0.0, g)
    elif ACT == "silu":
        s = 1 / (1 + tl.exp(-u))
        g = g * s * (1 + u * (1 - s))
    elif ACT == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * u * u)
        g = g * (0.5 * (1 + tl.erf(u * 0.7071067811865476)) + u * density)
    elif ACT == "hardswish":
        g = tl.where(u <= -3, 0.0, tl.where(u < 3, g * (u / 3 + 0.5), g))
    return g


@triton.jit
def at(start, image, c, p, step_b, step_c, step_p):
    """Addresses in a map, 64 bits wide."""
    return start + tl.cast(image, tl.int64) * step_b + tl.cast(c, tl.int64) * step_c + tl.cast(p, tl.int64) * step_p


@triton.jit
def tile(channels, pixels, LAST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """(image, channels, pixels) of this program's tile of a map."""
    pixel_tiles, channel_tiles = tl.cdiv(pixels, BLOCK_P), tl.cdiv(channels, BLOCK_C)
    program = tl.program_id(0)
    pixel = program % pixel_tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    p, c = tile_of(pixel, program // pixel_tiles % channel_tiles * BLOCK_C + tl.arange(0, BLOCK_C), LAST)
    return program // pixel_tiles // channel_tiles, c, p


@triton.jit
def stretch_of(batch, channels, pixels, images, span, BLOCK_C: tl.constexpr):
    """(number of this program's stretch, its channels, its images from and to, its pixels of each from and to)."""
    channel_tiles = tl.cdiv(channels, BLOCK_C)
    channel = tl.program_id(0) % channel_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    stretch = tl.program_id(0) // channel_tiles
    first, last, begin, end = bounds(stretch, batch, pixels, images, span)
    return stretch, channel, first, last, begin, end


@triton.jit
def bounds(stretch, batch, pixels, images, span):
    spans = tl.cdiv(pixels, span)
    first, begin = stretch // spans * images, stretch % spans * span
    return first, tl.minimum(first + images, batch), begin, tl.minimum(begin + span, pixels)


@triton.jit
def parameters(mean, rstd, weight, bias, c, known):
    """(mean, rstd, rstd * weight, bias) of channels c, float32."""
    m, r = tl.load(mean + c, mask=known, other=0.0).to(tl.float32), tl.load(rstd + c, mask=known, other=0.0)
    scale, shift = r, tl.zeros_like(r)
    if weight is not None:
        scale = r * tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + c, mask=known, other=0.0).to(tl.float32)
    return m, r, scale, shift


@triton.jit
def upstream(grad, pooled, image, c, p, inside, channels, pixels, grad_b, grad_c, grad_p):
    """The gradient of the activation, float32; 0 outside."""
    g = tl.zeros(inside.shape, tl.float32)
    if grad is not None:
        g += tl.load(at(grad, image, c, p, grad_b, grad_c, grad_p), mask=inside, other=0.0).to(tl.float32)
    if pooled is not None:
        means = tl.load(pooled + tl.cast(image, tl.int64) * channels + c, mask=c < channels, other=0.0)
        g += tl.where(inside, means.to(tl.float32) / pixels, 0.0)
    return g


@triton.jit(do_not_specialize=SIZES)
def norm_statistics(
    x, partial, batch, channels, pixels, images, span, x_b, x_c, x_p,
    LAST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial: mean, and sum of squares about it, of each stretch."""
    AXIS: tl.constexpr = 0 if LAST else 1
    stretch, channel, first, last, begin, end = stretch_of(batch, channels, pixels, images, span, BLOCK_C)
    p, c = tile_of(begin + tl.arange(0, BLOCK_P), channel, LAST)
    z = tl.load(at(x, first, c, p, x_b, x_c, x_p), mask=(c < channels) & (p < end), other=0.0).to(tl.float32)
    centre = tl.sum(z, AXIS) / tl.minimum(end - begin, BLOCK_P)
    sums, squares = tl.zeros_like(z), tl.zeros_like(z)
    for image in range(first, last):
        for start in range(begin, end, BLOCK_P):
            p, c = tile_of(start + tl.arange(0, BLOCK_P), channel, LAST)
            inside = (c < channels) & (p < end)
            z = tl.load(at(x, image, c, p, x_b, x_c, x_p), mask=inside, other=0.0).to(tl.float32)
            z = tl.where(inside, z - tl.expand_dims(centre, AXIS), 0.0)
            sums += z
            squares += z * z
    total = tl.sum(sums, AXIS)
    off = total / ((last - first) * (end - begin))
    place = partial + tl.cast(stretch, tl.int64) * 2 * channels + channel
    tl.store(place, centre + off, mask=channel < channels)
    tl.store(place + channels, tl.sum(squares, AXIS) - total * off, mask=channel < channels)


@triton.jit(do_not_specialize=("number", "span", *SIZES))
def norm_join(
    partial, moments, number, batch, channels, pixels, images, span, count, eps,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """moments (3, C): mean, 1 / sqrt(var + eps) and var, of the `count` numbers of all stretches."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = tl.zeros((1, BLOCK_C), tl.float32)
    squares = tl.zeros((1, BLOCK_C), tl.float32)
    for squaring in tl.static_range(2):
        sums = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
        for start in range(0, number, BLOCK_S):
            stretch = start + tl.arange(0, BLOCK_S)[:, None]
            first, last, begin, end = bounds(stretch, batch, pixels, images, span)
            inside = (stretch < number) & (channel[None, :] < channels)
            place = partial + tl.cast(stretch, tl.int64) * 2 * channels + channel[None, :]
            own, numbers = tl.load(place, mask=inside, other=0.0), (last - first) * (end - begin)
            if squaring:
                sums += tl.load(place + channels, mask=inside, other=0.0)
                own = (own - mean) * (own - mean)
            sums += tl.where(inside, own * numbers, 0.0)
        if squaring:
            squares = tl.sum(sums, 0)[None, :]
        else:
            mean = tl.sum(sums, 0)[None, :] / count
    var = tl.where(squares < 0, 0.0, squares) / count  # rounding can make it less than 0; NaN stays
    place, known = moments + channel[None, :], channel[None, :] < channels
    tl.store(place, mean, mask=known)
    tl.store(place + channels, 1 / tl.sqrt_rn(var + eps), mask=known)
    tl.store(place + 2 * channels, var, mask=known)


@triton.jit
def norm_act_map(
    x, mean, rstd, weight, bias, out, channels, pixels, x_b, x_c, x_p, out_b, out_c, out_p,
    ACT: tl.constexpr, LAST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out (B, C, P)."""
    image, c, p = tile(channels, pixels, LAST, BLOCK_P, BLOCK_C)
    inside = (c < channels) & (p < pixels)
    m, _, scale, shift = parameters(mean, rstd, weight, bias, c, c < channels)
    z = tl.load(at(x, image, c, p, x_b, x_c, x_p), mask=inside, other=0.0).to(tl.float32)
    a = activated((z - m) * scale + shift, ACT)
    tl.store(at(out, image, c, p, out_b, out_c, out_p), a.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def norm_act_sums(
    grad, pooled, x, mean, rstd, weight, bias, partial, batch, channels, pixels, images, span,
    grad_b, grad_c, grad_p, x_b, x_c, x_p,
    ACT: tl.constexpr, LAST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial: shares of each stretch in the gradients of bias and weight."""
    AXIS: tl.constexpr = 0 if LAST else 1
    stretch, channel, first, last, begin, end = stretch_of(batch, channels, pixels, images, span, BLOCK_C)
    p, c = tile_of(begin + tl.arange(0, BLOCK_P), channel, LAST)
    m, r, scale, shift = parameters(mean, rstd, weight, bias, c, c < channels)
    sums = tl.zeros((BLOCK_P, BLOCK_C) if LAST else (BLOCK_C, BLOCK_P), tl.float32)
    products = tl.zeros_like(sums)
    for image in range(first, last):
        for start in range(begin, end, BLOCK_P):
            p, c = tile_of(start + tl.arange(0, BLOCK_P), channel, LAST)
            inside = (c < channels) & (p < end)
            z = tl.load(at(x, image, c, p, x_b, x_c, x_p), mask=inside, other=0.0).to(tl.float32) - m
            h = upstream(grad, pooled, image, c, p, inside, channels, pixels, grad_b, grad_c, grad_p)
            h = tl.where(inside, sloped(h, z * scale + shift, ACT), 0.0)
            sums += h
            products += h * (z * r)
    place = partial + tl.cast(stretch, tl.int64) * 2 * channels + channel
    tl.store(place, tl.sum(sums, AXIS), mask=channel < channels)
    tl.store(place + channels, tl.sum(products, AXIS), mask=channel < channels)


@triton.jit
def norm_act_gradient(
    grad, pooled, x, mean, rstd, weight, bias, sums, into, channels, pixels, count,
    grad_b, grad_c, grad_p, x_b, x_c, x_p, into_b, into_c, into_p,
    ACT: tl.constexpr, LAST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """into (B, C, P), which may be grad; sums (2, C), or None where statistics are frozen."""
    image, c, p = tile(channels, pixels, LAST, BLOCK_P, BLOCK_C)
    inside = (c < channels) & (p < pixels)
    m, r, scale, shift = parameters(mean, rstd, weight, bias, c, c < channels)
    z = tl.load(at(x, image, c, p, x_b, x_c, x_p), mask=inside, other=0.0).to(tl.float32) - m
    h = upstream(grad, pooled, image, c, p, inside, channels, pixels, grad_b, grad_c, grad_p)
    h = sloped(h, z * scale + shift, ACT)
    if sums is not None:
        of_bias = tl.load(sums + c, mask=c < channels, other=0.0) / count
        of_weight = tl.load(sums + channels + c, mask=c < channels, other=0.0) / count
        h -= of_bias + z * r * of_weight
    tl.store(at(into, image, c, p, into_b, into_c, into_p), (h * scale).to(into.dtype.element_ty), mask=inside)
