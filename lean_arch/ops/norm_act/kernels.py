"""BatchNorm with an activation by Triton kernels: float32 inside, contiguous and channels_last alike.

PyTorch's own statistics take one program a channel where maps are contiguous, which leaves most of a large GPU idle;
here channels and stretches of pixels share it, and `norm_join` makes one of their results, always in the same order.

Shapes as in reference.py; a kernel takes a map as (B, C, P), P = H * W, with its strides.
"""

import itertools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from lean_arch.ops.depthwise.kernels import NUM_WARPS, REGISTERS, check, device_of, limits
from lean_arch.ops.depthwise.reference import layout_of
from lean_arch.ops.norm_act.passes import norm_act_gradient, norm_act_map, norm_act_sums, norm_join, norm_statistics
from lean_arch.ops.norm_act.reference import Norm, move
from lean_arch.ops.targets import DTYPES, Build, Target

TILE = 1024  # numbers of it: 8 a thread, the widest load in 16 bits
STEPS = 8  # tiles of a stretch, or as many as leave STRETCHES of them
STRETCHES = 1024
JOINED = 64, 16  # stretches and channels that are read at a time when stretches are joined


def blocks(channels: int, pixels: int, last: bool) -> dict:
    """The tile: as long as a warp or two along the side of neighbours, then along the other."""
    side, other = (channels, pixels) if last else (pixels, channels)
    long = min(triton.next_power_of_2(side), 64 if last else 256)
    short = min(triton.next_power_of_2(other), TILE // long)
    return dict(zip(("BLOCK_C", "BLOCK_P") if last else ("BLOCK_P", "BLOCK_C"), (long, short))) | {"LAST": last}


def stretches(batch: int, pixels: int, block: int) -> tuple[int, int, int]:
    """(how many, images of each, pixels of each image): some of a large map, or small maps of several images."""
    wanted = max(STEPS, triton.cdiv(batch * pixels, STRETCHES * block)) * block  # whole tiles, for wide loads
    span, images = min(wanted, pixels), min(max(wanted // pixels, 1), batch)
    return triton.cdiv(batch, images) * triton.cdiv(pixels, span), images, span


def tiled(flat: Tensor) -> tuple[dict, int]:
    """(the tile of a map (B, C, P) and how it is run, tiles to all of its channels)."""
    _, channels, pixels = flat.shape
    tile = blocks(channels, pixels, channels > 1 and pixels > 1 and flat.stride(1) == 1)
    return tile | limits(flat), triton.cdiv(channels, tile["BLOCK_C"])


def by_stretches(kernel, flat: Tensor, inputs: tuple, *strides: int, **act: str) -> tuple[Tensor, tuple[int, ...]]:
    """(the partial results (stretches, 2, C) that `kernel` leaves, the sizes that say what stretches they are of)."""
    tile, channel_tiles = tiled(flat)
    number, *stretch = stretches(flat.shape[0], flat.shape[2], tile["BLOCK_P"])
    partial, sizes = flat.new_empty(number, 2, flat.shape[1], dtype=torch.float32), (*flat.shape, *stretch)
    with device_of(flat):
        kernel[(number * channel_tiles,)](*inputs, partial, *sizes, *strides, *flat.stride(), **tile, **act)
    return partial, sizes


def over_tiles(kernel, flat: Tensor, inputs: tuple, into: Tensor, *sizes: float, **act: str) -> Tensor:
    """`into`, which `kernel` writes."""
    tile, channel_tiles = tiled(flat)
    (batch, channels, pixels), written = flat.shape, into.flatten(2)
    with device_of(flat):
        kernel[(batch * channel_tiles * triton.cdiv(pixels, tile["BLOCK_P"]),)](
            *inputs, written, channels, pixels, *sizes, *flat.stride(), *written.stride(), **tile, **act
        )
    return into if written.data_ptr() == into.data_ptr() else into.copy_(written.view(into.shape))


def statistics(flat: Tensor, eps: float) -> Tensor:
    """(3, C): mean, 1 / sqrt(var + eps) and var."""
    partial, sizes = by_stretches(norm_statistics, flat, (flat,))
    batch, channels, pixels = flat.shape
    moments = flat.new_empty(3, channels, dtype=torch.float32)
    with device_of(flat):
        norm_join[(triton.cdiv(channels, JOINED[1]),)](
            partial, moments, len(partial), *sizes, float(batch * pixels), eps, *JOINED, num_warps=NUM_WARPS
        )
    return moments


def forward(x, weight, bias, running_mean, running_var, batch: bool, momentum: float, eps: float, act: str):
    """As in reference.py."""
    check(x)
    if batch:
        mean, rstd, var = statistics(x.flatten(2), eps)
        move(running_mean, running_var, mean, var, x.numel() // x.shape[1], momentum)
        norm = Norm(mean, rstd, None, eps, act, "triton")
    else:
        norm = Norm(running_mean, torch.rsqrt(running_var.float() + eps), running_var, eps, act, "triton")
    return activate(x, weight, bias, norm), norm


def of_channels(norm: Norm, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.contiguous() for t in (norm.mean, norm.rstd, weight, bias))


def activate(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
    """As in reference.py; to the bit what `forward` gave."""
    flat = x.flatten(2)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=layout_of(x))
    return over_tiles(norm_act_map, flat, (flat, *of_channels(norm, weight, bias)), out, ACT=norm.act)


def backward(
    grad: Tensor | None,
    pooled_grad: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    into: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As in reference.py; the gradients of weight and bias are float32."""
    flat, grad = x.flatten(2), None if grad is None else grad.flatten(2)
    pooled_grad = None if pooled_grad is None else pooled_grad.contiguous()
    strides = (0, 0, 0) if grad is None else grad.stride()
    inputs = grad, pooled_grad, flat, *of_channels(norm, weight, bias)
    sums = by_stretches(norm_act_sums, flat, inputs, *strides, ACT=norm.act)[0].sum(0)
    inputs += (sums if norm.var is None else None,)
    count = float(x.numel() // x.shape[1])
    over_tiles(norm_act_gradient, flat, inputs, into, count, *strides, ACT=norm.act)
    return into, sums[1], sums[0]


SIGNATURE = {
    **dict.fromkeys(("grad", "pooled", "x", "out", "into"), "*DTYPE:16"),
    **dict.fromkeys(("mean", "rstd", "weight", "bias", "partial", "moments", "sums"), "*fp32:16"),
    **dict.fromkeys(("channels", "pixels", "span"), "i32:16"),
    **dict.fromkeys((f"{map}_{side}" for map in ("grad", "x", "out", "into") for side in "bcp"), "i32:16"),
    **dict.fromkeys(("count", "eps"), "fp32"),
}


def builds(target: Target) -> Iterator[Build]:
    """Each kernel in both layouts, with all its choices, and of the activations that which takes the most registers."""
    most = REGISTERS if target.backend == "cuda" else None
    for last, dtype in itertools.product((False, True), DTYPES):
        tile = blocks(128, 4096, last)
        near = ("x_c", "out_c", "grad_c", "into_c") if last else ("x_p", "out_p", "grad_p", "into_p")
        for fn in (norm_statistics, norm_act_map, norm_act_sums, norm_act_gradient):
            constexprs = {n: 1 for n in near if n in fn.arg_names} | {"ACT": "gelu"} | tile
            constexprs = {n: value for n, value in constexprs.items() if n in fn.arg_names}
            signature = {n: SIGNATURE.get(n, "i32").replace("DTYPE", dtype) for n in fn.arg_names}
            signature = {n: kind for n, kind in signature.items() if n not in constexprs}
            name = f"{fn.__name__}{'_channels_last' * last}"
            yield Build(name, dtype, fn, signature, constexprs, NUM_WARPS, 1, uses_dot=False, maxnreg=most)
    signature = {n: SIGNATURE.get(n, "i32") for n in norm_join.arg_names[:-2]}
    constexprs = dict(zip(("BLOCK_S", "BLOCK_C"), JOINED))
    yield Build("norm_join", "fp32", norm_join, signature, constexprs, NUM_WARPS, 1, uses_dot=False)
