"""Which tiles the attention kernels take on which GPU: a table, not a search at run time.

No entry spills registers or takes more shared memory than its target has; `python -m benchmarks.kernels
--compile_only` proves it for every one of them.
"""

from typing import NamedTuple

from lean_arch.ops.targets import Target


class Tiling(NamedTuple):
    tile_q: int
    tile_k: int
    num_warps: int
    num_stages: int


HEAD_SIZES = (64, 128, 256)  # a smaller or middling one takes the tiles of the next of these

# kernel, kind of numbers -> target, or its maker, or how much shared memory it has -> (tile_q, tile_k, warps, stages)
TABLE = {
    ("attention_forward", "half"): {
        "large": ((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
        "sm_120": ((128, 64, 8, 3), (64, 64, 8, 2), (64, 32, 8, 2)),
        "small": ((128, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 2)),
        "hip": ((128, 64, 4, 1), (128, 32, 4, 1), (64, 32, 4, 1)),
    },
    ("attention_forward", "fp32"): {
        "cuda": ((32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
        "hip": ((64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    },
    ("attention_dq", "half"): {
        "large": ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
        "sm_120": ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
        "small": ((64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
        "hip": ((64, 64, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1)),
    },
    ("attention_dq", "fp32"): {
        "cuda": ((32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
        "hip": ((32, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
    },
    ("attention_dkdv", "half"): {
        "sm_80": ((32, 64, 4, 2), (64, 64, 8, 2), (32, 64, 8, 2)),
        "sm_90": ((64, 128, 8, 2), (32, 128, 8, 2), (32, 32, 8, 2)),
        "large": ((64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 8, 2)),
        "sm_120": ((64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        "small": ((64, 64, 4, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        "hip": ((32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    },
    ("attention_dkdv", "fp32"): {
        "sm_120": ((32, 32, 8, 1), (16, 32, 4, 1), (32, 32, 8, 1)),
        "large": ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
        "small": ((32, 32, 8, 1), (16, 32, 8, 1), (32, 32, 8, 1)),
        "hip": ((32, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
    },
}


def tiling(kernel: str, target: Target, dtype: str, block_d: int) -> Tiling:
    """For a kernel by name, a target, Triton's name of a dtype and a head size that is a power of two."""
    table = TABLE[kernel, "fp32" if dtype == "fp32" else "half"]
    kinds = (target.name, target.backend, "large" if target.shared_limit > 128 * 1024 else "small")
    sizes = next(table[kind] for kind in kinds if kind in table)
    return Tiling(*sizes[sum(block_d > size for size in HEAD_SIZES)])
