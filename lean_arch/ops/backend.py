"""Which implementation of an op runs: Triton's kernels, PyTorch's operators, or the reference a student can read."""

import contextlib
import contextvars
import functools
import os
import warnings
from collections.abc import Iterator

import torch

BACKENDS = ("reference", "torch", "triton")
_chosen = contextvars.ContextVar("lean_arch_backend", default=None)


@contextlib.contextmanager
def use(backend: str) -> Iterator[None]:
    """Within, the ops of `lean_arch.ops` run by `backend`: "reference", "torch" or "triton".

    Without, a GPU with tensor cores that Triton can use (NVIDIA from sm_80 on, AMD's gfx9) runs Triton's kernels and
    all else PyTorch. Raises ValueError for another name; an op raises RuntimeError where its backend cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} does not exist; {', '.join(BACKENDS)} do")
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


def backend_for(device: torch.device) -> str:
    """The backend that an op on tensors of `device` runs by."""
    wanted = _chosen.get()
    if wanted == "triton" and not interpreted() and (device.type != "cuda" or not _triton_is_there()):
        raise RuntimeError(
            f"backend 'triton' does not run on {device.type} here; 'torch' does, and so does Triton's interpreter, "
            "for tests (TRITON_INTERPRET=1)"
        )
    if wanted is not None:
        return wanted
    return "triton" if device.type == "cuda" and _has_matrix_units(device) and _triton_is_there() else "torch"


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_is_there() -> bool:
    try:
        import triton  # noqa: F401 (macOS and Windows do without)
    except ImportError:
        return False
    return True


@functools.cache
def _has_matrix_units(device: torch.device) -> bool:
    """Whether Triton's dot products run on tensor cores there. Says so, once a device, where they do not."""
    properties = torch.cuda.get_device_properties(device)
    amd = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    good = amd.startswith("gfx9") if amd else properties.major >= 8
    if not good:
        warnings.warn(
            f"{properties.name}: Triton's kernels would not run on matrix units there, so PyTorch runs lean_arch's ops",
            stacklevel=2,
        )
    return good
