"""The depthwise convolution by Triton kernels, contiguous and channels_last alike, with float32 sums.

A program takes some channels and some pixels of an image and goes over the taps; the tile lies along the side on which
numbers are neighbours in memory. `depthwise_map` makes y of x, and grad_x of grad (BACK), where a tap that falls
between two strides counts for nothing. `depthwise_weight` sums grad * x over a stretch of pixels for one row of taps;
the sums of all stretches are added up afterwards. There are no atomics, so the same input gives the same bits.

Shapes as in reference.py; a tile (BLOCK_C, BLOCK_P), or (BLOCK_P, BLOCK_C) where LAST: channels_last; partial sums of
the weight's gradient (stretches, kh, kw, C).
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_arch.ops.depthwise import portable
from lean_arch.ops.depthwise.reference import Pair, layout_of, new_input_gradient, new_output
from lean_arch.ops.targets import DTYPES, Build, Target

NUM_WARPS = 4
TILE = 512  # numbers of it: 4 a thread, which leave registers for taps that are written out
REGISTERS = 255  # that a thread may take: left to itself, ptxas spills a few to take fewer
UNROLLED = 7  # taps of a row, up to which they are written out one by one
STRETCH = 2048  # pixels that are summed up by one program, or 64 for every tap where that is more


@triton.jit
def source(at, tap, stride, padding, dilation, size, BACK: tl.constexpr):
    """(where `tap` reads for an output at `at`, whether that is anywhere), along one side of the map."""
    if BACK:
        ahead = at + padding - tap * dilation
        place = ahead // stride
        there = (ahead >= 0) & (place < size) & (place * stride == ahead)
    else:
        place = at * stride + tap * dilation - padding
        there = (place >= 0) & (place < size)
    return place, there


@triton.jit
def tile_of(pixels, channels, LAST: tl.constexpr):
    """Both as the sides of a tile."""
    return (pixels[:, None], channels[None, :]) if LAST else (pixels[None, :], channels[:, None])


@triton.jit
def depthwise_map(
    x, weight, bias, out, channels, height, width, out_height, out_width,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    x_b, x_c, x_h, x_w, out_b, out_c, out_h, out_w,
    KH: tl.constexpr, KW: tl.constexpr, UNROLL: tl.constexpr, BACK: tl.constexpr, LAST: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out (B, C, out_height, out_width) of x (B, C, height, width), each with its strides; weight is contiguous."""
    pixel_tiles, channel_tiles = tl.cdiv(out_height * out_width, BLOCK_P), tl.cdiv(channels, BLOCK_C)
    program = tl.program_id(0)
    image = tl.cast(program // pixel_tiles // channel_tiles, tl.int64)
    pixel = program % pixel_tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = program // pixel_tiles % channel_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    p, c = tile_of(pixel, channel, LAST)
    known = c < channels
    inside = known & (p < out_height * out_width)
    h, w = p // out_width, p % out_width
    x_at = x + image * x_b + tl.cast(c, tl.int64) * x_c
    w_at = weight + tl.cast(c, tl.int64) * (KH * KW)
    sums = tl.zeros(inside.shape, tl.float32)
    for i in range(KH):
        row, row_there = source(h, i, stride_h, padding_h, dilation_h, height, BACK)
        row_at, row_inside = x_at + tl.cast(row, tl.int64) * x_h, inside & row_there
        for j in tl.range(KW, loop_unroll_factor=KW if UNROLL else 1):
            column, there = source(w, j, stride_w, padding_w, dilation_w, width, BACK)
            numbers = tl.load(row_at + tl.cast(column, tl.int64) * x_w, mask=row_inside & there, other=0.0)
            taps = tl.load(w_at + i * KW + j, mask=known, other=0.0)
            sums += numbers.to(tl.float32) * taps.to(tl.float32)
    if bias is not None:
        sums += tl.load(bias + c, mask=known, other=0.0).to(tl.float32)
    out_at = out + image * out_b + tl.cast(c, tl.int64) * out_c
    out_at += tl.cast(h, tl.int64) * out_h + tl.cast(w, tl.int64) * out_w
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def depthwise_weight(
    grad, x, partial, batch, channels, height, width, out_height, out_width,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    grad_b, grad_c, grad_h, grad_w, x_b, x_c, x_h, x_w, images, span,
    KH: tl.constexpr, KW: tl.constexpr, LAST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial (stretches, KH, KW, C); a stretch is `span` pixels of each of `images` images. One row of taps each."""
    program = tl.program_id(0)
    i = program % KH
    channel_tiles = tl.cdiv(channels, BLOCK_C)
    channel = program // KH % channel_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    stretch = program // KH // channel_tiles
    spans = tl.cdiv(out_height * out_width, span)
    begin = stretch % spans * span
    end = tl.minimum(begin + span, out_height * out_width)
    first = stretch // spans * images
    last = tl.minimum(first + images, batch)
    for j in range(KW):
        sums = tl.zeros((BLOCK_P, BLOCK_C) if LAST else (BLOCK_C, BLOCK_P), tl.float32)
        for image in range(first, last):
            for start in range(begin, end, BLOCK_P):
                p, c = tile_of(start + tl.arange(0, BLOCK_P), channel, LAST)
                inside = (c < channels) & (p < end)
                h, w = p // out_width, p % out_width
                row, row_there = source(h, i, stride_h, padding_h, dilation_h, height, False)
                column, there = source(w, j, stride_w, padding_w, dilation_w, width, False)
                g_at = grad + tl.cast(image, tl.int64) * grad_b + tl.cast(c, tl.int64) * grad_c
                g_at += tl.cast(h, tl.int64) * grad_h + tl.cast(w, tl.int64) * grad_w
                x_at = x + tl.cast(image, tl.int64) * x_b + tl.cast(c, tl.int64) * x_c
                x_at += tl.cast(row, tl.int64) * x_h + tl.cast(column, tl.int64) * x_w
                g = tl.load(g_at, mask=inside, other=0.0)
                numbers = tl.load(x_at, mask=inside & row_there & there, other=0.0)
                sums += g.to(tl.float32) * numbers.to(tl.float32)
        at = ((tl.cast(stretch, tl.int64) * KH + i) * KW + j) * channels + channel
        tl.store(partial + at, tl.sum(sums, 0 if LAST else 1), mask=channel < channels)


def blocks(channels: int, pixels: int, last: bool) -> dict[str, int]:
    """The tile: as long as a warp or two along the side of neighbours, then along the other."""
    side, other = (channels, pixels) if last else (pixels, channels)
    long = min(triton.next_power_of_2(side), 64 if last else 256)
    short = min(triton.next_power_of_2(other), TILE // long)
    return dict(zip(("BLOCK_C", "BLOCK_P") if last else ("BLOCK_P", "BLOCK_C"), (long, short))) | {"LAST": last}


def stretches(batch: int, pixels: int, taps: int) -> tuple[int, int, int]:
    """(how many, images of each, pixels of each image): some of a large map, or small maps of several images."""
    wanted = max(STRETCH, 64 * taps)
    span, images = min(wanted, pixels), min(max(wanted // pixels, 1), max(batch, 1))
    return triton.cdiv(batch, images) * triton.cdiv(pixels, span), images, span


def cudnn_is_fast(x: Tensor, grad_or_out: torch.dtype, weight: Tensor, stride: Pair, dilation: Pair) -> bool:
    """Whether cuDNN has a depthwise kernel of its own for this, by what PyTorch knows of it (Convolution.cpp).

    channels_last: any; contiguous: float16, no dilation, equal strides of 1 or 2, square filters of 1, 3 or 5, 32
    channels or more. Elsewhere PyTorch itself falls to a slow kernel. Nothing of this was measured against Triton's.
    """
    if not (x.is_cuda and torch.version.hip is None and torch.backends.cudnn.is_available()) or x.dtype != grad_or_out:
        return False
    if layout_of(x) == torch.channels_last:
        return True
    kh, kw = weight.shape[2:]
    square = kh == kw and kh in (1, 3, 5) and stride[0] == stride[1] and stride[0] in (1, 2)
    return x.dtype == torch.float16 and square and max(dilation) == 1 and x.shape[1] >= 32


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As in reference.py."""
    dtype = dtype or x.dtype
    check(x)
    if cudnn_is_fast(x, dtype, weight, stride, dilation):
        return portable.forward_at_once(x, weight, bias, stride, padding, dilation, dtype)
    out = new_output(x, weight, stride, padding, dilation, dtype)
    launch_map(x, weight, bias, out, stride, padding, dilation, back=False)
    return out


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As in reference.py. cuDNN makes no gradient of the weight: of its kernels for that some change the bits."""
    check(x)
    grad_x = grad_weight = None
    if needs[0]:
        if cudnn_is_fast(x, grad.dtype, weight, stride, dilation):
            only = (True, False, False)
            grad_x, _, _ = portable.backward_at_once(grad, x, weight, stride, padding, dilation, only)
        else:
            grad_x = new_input_gradient(x)
            launch_map(grad, weight, None, grad_x, stride, padding, dilation, back=True)
    if needs[1]:
        grad_weight = launch_weight(grad, x, weight.shape[2:], stride, padding, dilation)
    grad_bias = grad.sum((0, 2, 3), dtype=torch.float32) if needs[2] else None
    return grad_x, grad_weight, grad_bias


def check(x: Tensor):
    if x.dtype not in DTYPES.values():
        raise ValueError(
            f"x is {x.dtype}; Triton's kernels take float16, bfloat16 and float32, backend 'torch' this too"
        )


def limits(x: Tensor) -> dict[str, int]:
    return {"num_warps": NUM_WARPS} | ({"maxnreg": REGISTERS} if x.is_cuda and torch.version.hip is None else {})


def device_of(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def launch_map(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, stride: Pair, padding: Pair, dilation: Pair, back: bool
):
    """Writes y, or grad_x (`back`), into `out`, whose layout decides how the tiles lie."""
    batch, channels, height, width = out.shape
    kh, kw = weight.shape[2:]
    tile = blocks(channels, height * width, layout_of(out) == torch.channels_last)
    grid = batch * triton.cdiv(channels, tile["BLOCK_C"]) * triton.cdiv(height * width, tile["BLOCK_P"])
    if grid:
        with device_of(x):
            depthwise_map[(grid,)](
                x, weight.contiguous(), None if bias is None else bias.contiguous(), out,
                channels, *x.shape[2:], height, width, *stride, *padding, *dilation, *x.stride(), *out.stride(),
                KH=kh, KW=kw, UNROLL=kw <= UNROLLED, BACK=back, **tile, **limits(x),
            )  # fmt: skip


def launch_weight(grad: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """grad_weight (C, 1, kh, kw), float32."""
    batch, channels, height, width = grad.shape
    number, images, span = stretches(batch, height * width, kernel[0] * kernel[1])
    tile = blocks(channels, height * width, layout_of(x) == torch.channels_last)
    partial = x.new_empty(number, *kernel, channels, dtype=torch.float32)
    grid = number * triton.cdiv(channels, tile["BLOCK_C"]) * kernel[0]
    if grid:
        with device_of(x):
            depthwise_weight[(grid,)](
                grad, x, partial, batch, channels, *x.shape[2:], height, width, *stride, *padding, *dilation,
                *grad.stride(), *x.stride(), images, span, KH=kernel[0], KW=kernel[1], **tile, **limits(x),
            )  # fmt: skip
    return partial.sum(0).permute(2, 0, 1)[:, None].contiguous()


def builds(target: Target) -> Iterator[Build]:
    """Each kernel in both layouts, with taps that are written out and with taps that are not, strides and a bias."""
    for last, side, dtype in itertools.product((False, True), (UNROLLED, 31), DTYPES):
        tile, kernel = blocks(128, 4096, last), {"KH": side, "KW": side}
        near = ("x_c", "out_c", "grad_c") if last else ("x_w", "out_w", "grad_w")
        for name, fn, more in (
            ("depthwise_forward", depthwise_map, {"BACK": False, "UNROLL": side <= UNROLLED}),
            ("depthwise_input", depthwise_map, {"BACK": True, "UNROLL": side <= UNROLLED, "bias": None}),
            ("depthwise_weight", depthwise_weight, {}),
        ):
            constexprs = tile | kernel | more | {n: 1 for n in near if n in fn.arg_names}
            signature = {n: "i32" for n in fn.arg_names if n not in constexprs}
            signature |= {n: f"*{dtype}:16" for n in ("x", "weight", "bias", "out", "grad") if n in signature}
            signature |= {"partial": "*fp32:16"} if fn is depthwise_weight else {}
            full = f"{name}_k{side}{'_channels_last' * last}"
            most = REGISTERS if target.backend == "cuda" else None
            yield Build(full, dtype, fn, signature, constexprs, NUM_WARPS, 1, uses_dot=False, maxnreg=most)
