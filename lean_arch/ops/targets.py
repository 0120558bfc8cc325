"""The GPUs that the Triton kernels are built for, and what a kernels module says to be built for all of them.

A module of kernels offers `builds(target: Target) -> Iterator[Build]`; `benchmarks/kernels.py` lists those modules,
builds each of them for each of TARGETS without a GPU, and fails where one spills or takes too much shared memory.
"""

import dataclasses
import functools
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Target:
    """name as in the tables, arch as Triton wants it, shared_limit bytes that a block may take there."""

    name: str
    arch: int | str
    shared_limit: int

    @property
    def backend(self) -> str:
        return "cuda" if isinstance(self.arch, int) else "hip"

    @property
    def warp_size(self) -> int:
        return 32 if self.backend == "cuda" else 64


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", 80, 163 * 1024),  # A100
        Target("sm_86", 86, 99 * 1024),  # RTX 3090
        Target("sm_89", 89, 99 * 1024),  # L40, RTX 4090
        Target("sm_90", 90, 227 * 1024),  # H100, H200
        Target("sm_100", 100, 227 * 1024),  # B200
        Target("sm_120", 120, 99 * 1024),  # RTX 5090
        Target("gfx90a", "gfx90a", 64 * 1024),  # MI250
        Target("gfx942", "gfx942", 64 * 1024),  # MI300
    )
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}  # Triton's names


@dataclasses.dataclass(frozen=True)
class Build:
    """One kernel with everything that its machine code depends on, save the target.

    name is told from that of other kernels, head sizes and the like included; dtype is Triton's. signature: argument
    -> type, as "*bf16", "i32" or "fp32", with ":16" after it where the value or address is a multiple of 16.
    constexprs: argument -> value, for None and 1 too. uses_dot: whether matrix units should show. maxnreg:
    registers that a thread may take, on NVIDIA, where ptxas sometimes prefers a few spills to taking them.
    """

    name: str
    dtype: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    uses_dot: bool
    maxnreg: int | None = None


@functools.cache
def target_of(device: torch.device) -> Target:
    """The target whose tiles `device` takes: its own, or the nearest older one of its kind."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return TARGETS["gfx90a" if properties.gcnArchName.startswith(("gfx90a", "gfx908")) else "gfx942"]
    number = properties.major * 10 + properties.minor
    alike = [t for t in TARGETS.values() if t.backend == "cuda" and t.arch <= number]
    same = [t for t in alike if t.arch // 10 == properties.major]
    # an unknown generation takes the tiles of the newest that is content with the least shared memory
    return max(same or [t for t in alike if t.shared_limit < 100 * 1024], key=lambda t: t.arch)
