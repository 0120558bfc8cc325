"""LayerNorm over channels by Triton kernels, contiguous and channels_last alike, with float32 sums.

A program takes some pixels with all their channels, so x is read once; the tile lies along the side on which x's
numbers are neighbours in memory. `differentiate` computes mean and rstd again, and sums the gradients of weight and
bias over one tile after another; the sums of all programs are added up afterwards. There are no atomics, so the same
input gives the same bits.

Shapes as in reference.py; a tile (BLOCK_C, BLOCK_P), or (BLOCK_P, BLOCK_C) where LAST: channels_last; partial sums
(programs, 2, C): of weight and of bias.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_arch.ops.depthwise.kernels import check, device_of, tile_of
from lean_arch.ops.depthwise.reference import layout_of
from lean_arch.ops.layer_norm2d.reference import new_map
from lean_arch.ops.targets import DTYPES, Build, Target

CHANNELS = 2**12  # that fit a tile
TILE = 2048  # numbers of it, 8 a thread, or 16 of many channels: with two 64-bit addresses to each, more would spill
WARPS = {False: 8, True: 16}  # at most, by LAST: more leave too few registers to a thread, fewer too many numbers
PROGRAMS = 512  # that share the pixels of the backward pass, at most


@triton.jit
def place(pixel, height, width, stride_b, stride_h, stride_w):
    """Where pixels are in memory, counted over all images."""
    image, within = pixel // (height * width), pixel % (height * width)
    return image * stride_b + within // width * stride_h + within % width * stride_w


@triton.jit
def standardise(x, inside, channels, eps, AXIS: tl.constexpr):
    """((x - mean) * rstd, rstd) of a tile with zeros outside."""
    centred = tl.where(inside, x - tl.sum(x, AXIS, keep_dims=True) / channels, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, AXIS, keep_dims=True) / channels + eps)
    return centred * rstd, rstd


@triton.jit
def normalise(
    x, weight, bias, out, pixels, channels, height, width, eps,
    x_b, x_c, x_h, x_w, out_b, out_c, out_h, out_w,
    LAST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out (B, C, height, width) of x, each with its strides."""
    pixel = tl.cast(tl.program_id(0), tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    p, c = tile_of(pixel, tl.arange(0, BLOCK_C), LAST)
    known = c < channels
    inside = known & (p < pixels)
    x_at = x + place(p, height, width, x_b, x_h, x_w) + tl.cast(c, tl.int64) * x_c
    u, _ = standardise(tl.load(x_at, mask=inside, other=0.0).to(tl.float32), inside, channels, eps, 1 if LAST else 0)
    if weight is not None:
        u *= tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
    if bias is not None:
        u += tl.load(bias + c, mask=known, other=0.0).to(tl.float32)
    out_at = out + place(p, height, width, out_b, out_h, out_w) + tl.cast(c, tl.int64) * out_c
    tl.store(out_at, u.to(out.dtype.element_ty), mask=inside)


@triton.jit
def differentiate(
    grad, x, weight, of_x, partial, pixels, channels, height, width, eps, tiles,
    grad_b, grad_c, grad_h, grad_w, x_b, x_c, x_h, x_w, of_x_b, of_x_c, of_x_h, of_x_w,
    LAST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """of_x like x, and partial (programs, 2, C), of `tiles` tiles of pixels a program; either may be None."""
    AXIS: tl.constexpr = 1 if LAST else 0
    channel = tl.arange(0, BLOCK_C)
    program = tl.cast(tl.program_id(0), tl.int64)
    of_weight = tl.zeros((BLOCK_C,), tl.float32)
    of_bias = tl.zeros((BLOCK_C,), tl.float32)
    for tile in range(tiles):
        p, c = tile_of((program * tiles + tile) * BLOCK_P + tl.arange(0, BLOCK_P), channel, LAST)
        inside = (c < channels) & (p < pixels)
        x_at = x + place(p, height, width, x_b, x_h, x_w) + tl.cast(c, tl.int64) * x_c
        grad_at = grad + place(p, height, width, grad_b, grad_h, grad_w) + tl.cast(c, tl.int64) * grad_c
        u, rstd = standardise(tl.load(x_at, mask=inside, other=0.0).to(tl.float32), inside, channels, eps, AXIS)
        g = tl.load(grad_at, mask=inside, other=0.0).to(tl.float32)
        if partial is not None:
            of_weight += tl.sum(g * u, 1 - AXIS)
            of_bias += tl.sum(g, 1 - AXIS)
        if of_x is not None:
            if weight is not None:
                g *= tl.load(weight + c, mask=c < channels, other=0.0).to(tl.float32)
            along = tl.sum(g * u, AXIS, keep_dims=True) / channels
            g = (g - tl.sum(g, AXIS, keep_dims=True) / channels - u * along) * rstd
            of_x_at = of_x + place(p, height, width, of_x_b, of_x_h, of_x_w) + tl.cast(c, tl.int64) * of_x_c
            tl.store(of_x_at, g.to(of_x.dtype.element_ty), mask=inside)
    if partial is not None:
        at = partial + program * 2 * channels + channel
        tl.store(at, of_weight, mask=channel < channels)
        tl.store(at + channels, of_bias, mask=channel < channels)


def blocks(channels: int, pixels: int, last: bool) -> tuple[dict[str, int], int]:
    """(the tile, warps for it)."""
    wide = triton.next_power_of_2(channels)
    block = min(max(TILE // wide, 1), triton.next_power_of_2(max(pixels, 1)))
    return {"BLOCK_P": block, "BLOCK_C": wide, "LAST": last}, min(max(wide * block // 256, 1), WARPS[last])


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As in reference.py. Raises ValueError for float64 and for more than CHANNELS channels."""
    out = new_map(x)
    pixels, tile, warps = _problem(x)
    if pixels:
        with device_of(x):
            normalise[(triton.cdiv(pixels, tile["BLOCK_P"]),)](
                x, *_dense(weight, bias), out, pixels, *x.shape[1:], eps, *x.stride(), *out.stride(),
                **tile, num_warps=warps,
            )  # fmt: skip
    return out


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As in reference.py."""
    pixels, tile, warps = _problem(x)
    tiles = triton.cdiv(pixels, tile["BLOCK_P"])
    each = triton.cdiv(tiles, PROGRAMS) or 1
    programs = triton.cdiv(tiles, each)
    of_x = new_map(x) if needs[0] else None
    partial = x.new_empty(programs, 2, x.shape[1], dtype=torch.float32) if any(needs[1:]) else None
    if pixels:
        strides = (0, 0, 0, 0) if of_x is None else of_x.stride()
        with device_of(x):
            differentiate[(programs,)](
                grad, x, *_dense(weight), of_x, partial, pixels, *x.shape[1:], eps, each,
                *grad.stride(), *x.stride(), *strides, **tile, num_warps=warps,
            )  # fmt: skip
    return of_x, *(partial[:, i].sum(0) if need else None for i, need in enumerate(needs[1:]))


def _problem(x: Tensor) -> tuple[int, dict[str, int], int]:
    check(x)
    if x.shape[1] > CHANNELS:
        raise ValueError(f"x has {x.shape[1]} channels; Triton's kernels take {CHANNELS}, backend 'torch' any number")
    pixels = x.numel() // x.shape[1]
    return pixels, *blocks(x.shape[1], pixels, layout_of(x) == torch.channels_last)


def _dense(*affine: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in affine]


def builds(target: Target) -> Iterator[Build]:
    """Each kernel in both layouts, with few and with many channels, of weights in float32."""
    for last, channels, dtype in itertools.product((False, True), (96, 4096), DTYPES):
        tile, warps = blocks(channels, 2**16, last)
        near = ("x_c", "grad_c") if last else ("x_w", "grad_w")
        for name, fn in (("forward", normalise), ("backward", differentiate)):
            constexprs = tile | {n: 1 for n in (*near, "out_c", "of_x_c") if n in fn.arg_names}
            signature = {n: "i32" for n in fn.arg_names if n not in constexprs} | {"eps": "fp32"}
            signature |= {n: f"*{dtype}:16" for n in ("x", "grad", "out", "of_x") if n in signature}
            signature |= {n: "*fp32:16" for n in ("weight", "bias", "partial") if n in signature}
            full = f"layer_norm2d_{name}_c{channels}{'_channels_last' * last}"
            yield Build(full, dtype, fn, signature, constexprs, warps, 1, uses_dot=False)
