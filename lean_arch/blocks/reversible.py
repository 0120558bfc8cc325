"""Reversible stacks: the backward pass rebuilds every layer's input from the stack's output, exactly.

    y1 = x1 + f(x2)        x2 = y2 - g(y1)
    y2 = x2 + g(y1)        x1 = y1 - f(x2)

The coupling is that of RevNets (Gomez et al. 2017, arXiv 1707.04585) and Reformer (Kitaev et al. 2020, arXiv
2001.04451). Floating-point sums do not invert exactly, so what enters a stream is first rounded to a fixed grid:
sums and differences of grid points below 2^12 are exact, and the streams return bit for bit at any depth, under
any autocast.

Shapes: both streams (B, ...), alike; f and g map (B, ...) to (B, ...).
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lean_arch.ops.replay import Replay, autocast_as_now, frozen_statistics

RANGE_BITS = 12  # streams may reach 2^12 = 4096; the rest of the significand is the grid
MANTISSA_BITS = {torch.float32: 24, torch.float64: 53}


def round_to_grid(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor of `dtype` (float32 or float64): `x` to the nearest multiple of 2^-12 (float32) or 2^-41."""
    scale = 2.0 ** (MANTISSA_BITS[dtype] - RANGE_BITS)
    return x.to(dtype, copy=True).mul_(scale).round_().mul_(1 / scale)


def traceable_round(x: Tensor) -> Tensor:
    """round_to_grid, with gradient one, for compilers that know no autograd.Function. float32 unless x is float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = 2.0**41 if x.dtype == torch.float64 else 2.0**12
    fixed = wide.detach()
    return torch.round(fixed * scale) / scale + (wide - fixed)


class _RoundToGrid(torch.autograd.Function):
    """Rounding with gradient one (straight through)."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = x.dtype
        return round_to_grid(x, dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


class ReversiblePair(nn.Module):
    """Two modules (f, g) of one reversible layer: (x1, x2) -> (y1, y2). See ReversibleSequence."""

    def __init__(self, f: nn.Module, g: nn.Module):
        super().__init__()
        self.f = f
        self.g = g

    @torch.jit.unused
    def forward(self, x1: Tensor, x2: Tensor, run: "_Stored") -> tuple[Tensor, Tensor]:
        x2, y1 = run.half_step(self.f, x1, x2)
        return run.half_step(self.g, x2, y1)

    @torch.jit.export
    def plain(self, x1: Tensor, x2: Tensor, dtype: torch.dtype, exact: bool) -> tuple[Tensor, Tensor]:
        """The same arithmetic in operations that TorchScript, torch.export and ONNX can follow."""
        out = self.f(x2.to(dtype))
        y1 = x1 + (traceable_round(out) if exact else out)
        out = self.g(y1.to(dtype))
        return y1, x2 + (traceable_round(out) if exact else out)


class ReversibleSequence(nn.ModuleList):
    """A stack of reversible layers whose training memory does not grow with depth.

    Args:
        pairs: (f, g) modules, one pair a layer; each maps its input to a tensor of the same shape. Gradients flow
            to their input and to their parameters; a tensor that needs a gradient may not be captured otherwise.
        exact: round what enters the streams to a fixed grid (2^-12 in float32, 2^-41 in float64), so that they
            return bit for bit while they stay below 4096 (a warning says when they do not). 16-bit streams are
            carried in float32. False: plain sums, whose inversion drifts with depth.
        chunks: run f and g on up to this many parts of the batch, one after the other; what one layer needs for its
            backward falls with it. Only for f and g that treat batch items apart (no BatchNorm).
        least_chunk: elements of a stream below which a part is not made smaller; small matrices are slow.

    `reversible` (True) may be switched off: same arithmetic, activations stored by autograd, no replay.

    Dropout, autocast and BatchNorm statistics are replayed as they were. Second derivatives through a reversible
    run raise RuntimeError. `state_dict` keys are `0.f...`, `0.g...`, `1.f...`.
    """

    def __init__(self, pairs: Iterable = (), exact: bool = True, chunks: int = 1, least_chunk: int = 1):
        if chunks < 1:
            raise ValueError(f"chunks must be a positive number of parts, got {chunks}")
        if least_chunk < 1:
            raise ValueError(f"least_chunk must be a positive number of elements, got {least_chunk}")
        super().__init__(p if isinstance(p, ReversiblePair) else ReversiblePair(*p) for p in pairs)
        self.exact = exact
        self.chunks = chunks
        self.least_chunk = least_chunk
        self.reversible = True
        self._runs = 0

    def __getitem__(self, index):
        if not isinstance(index, slice):
            return super().__getitem__(index)
        part = type(self)(list(self._modules.values())[index], self.exact, self.chunks, self.least_chunk)
        part.reversible = self.reversible
        return part.train(self.training)

    def forward(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(x1, x2) -> (y1, y2), all of one shape and floating dtype. Raises ValueError when they differ."""
        if torch.jit.is_scripting():
            return self._plain(streams)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            return self._plain(streams)
        return self._run(streams)

    def _plain(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        dtype = streams[0].dtype
        x1, x2 = streams
        if self.exact:
            x1, x2 = traceable_round(x1), traceable_round(x2)
        for pair in self:
            x1, x2 = pair.plain(x1, x2, dtype, self.exact)
        return x1.to(dtype), x2.to(dtype)

    @torch.jit.unused
    @torch.compiler.disable  # the replay must repeat the forward's own kernels, bit for bit
    def _run(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x1, x2 = streams
        if x1.shape != x2.shape or x1.dtype != x2.dtype or not x1.is_floating_point():
            raise ValueError(
                "streams must be two floating tensors of one shape and dtype, "
                f"got {tuple(x1.shape)} {x1.dtype} and {tuple(x2.shape)} {x2.dtype}"
            )
        dtype = x1.dtype
        a, b = x1, x2
        if self.exact:
            wide = torch.promote_types(dtype, torch.float32)
            a = _RoundToGrid.apply(x1, wide)
            b = a.view_as(a) if x1 is x2 else _RoundToGrid.apply(x2, wide)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (a, b, *self.parameters()))
        rebuilt = self.reversible and needs_grad and len(self) > 0
        run = (_Rebuilt if rebuilt else _Stored)(self, a, dtype)
        for layer in self:
            a, b = layer(a, b, run)
        if rebuilt:
            a, b = _KeepStreams.apply(run, a, b)
            self._watch_range(run.reached)
        return a.to(dtype), b.to(dtype)

    def _watch_range(self, reached: Tensor):
        """Warn when a stream left the range in which sums are exact; on an accelerator, looked at now and then."""
        if not self.exact or type(reached) is not Tensor:  # a fake tensor has no value
            return
        self._runs += 1
        if reached.is_meta or (not reached.is_cpu and self._runs % 100):  # reading it waits for the device
            return
        if reached.item() >= 2**RANGE_BITS:
            warnings.warn(
                f"a reversible stream reached {reached.item():.0f}; beyond {2**RANGE_BITS} its gradients are no longer "
                "exact: lower the learning rate, normalise the outputs of f and g, or set_reversible(False)",
                stacklevel=3,
            )


class _Stored:
    """One pass over a stack whose activations autograd stores."""

    def __init__(self, stack: "ReversibleSequence", stream: Tensor, dtype: torch.dtype):
        self.exact = stack.exact
        self.chunks = max(min(stack.chunks, stream.numel() // stack.least_chunk), 1)
        self.dtype = dtype  # what f and g are given; the streams themselves may be wider
        self.autocast = autocast_as_now(stream.device)

    def half_step(self, f: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(a, b) -> (b, a + f(b))."""
        with self.autocast():
            parts = [_checked(f, part.to(self.dtype)) for part in b.chunk(self.chunks)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return b, a + (_RoundToGrid.apply(out, a.dtype) if self.exact else out)


class _Rebuilt(_Stored):
    """One pass over a stack that keeps only its last streams; each backward walks them back, a half-step at a time."""

    def __init__(self, stack: "ReversibleSequence", stream: Tensor, dtype: torch.dtype):
        super().__init__(stack, stream, dtype)
        # One 16-bit copy of each weight serves all parts of a half-step.
        self.autocast = autocast_as_now(stream.device, cache=self.chunks > 1)
        self.streams = None  # in backward: the streams after the half-step whose turn it is
        self.borrowed = 0  # how many of them belong to the caller and may not be overwritten
        self.reached = torch.zeros((), device=stream.device)  # largest |stream|

    def half_step(self, f: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return _HalfStep.apply(self, f, a, b, *(p for p in f.parameters() if p.requires_grad))

    def rounded(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        return round_to_grid(out, dtype) if self.exact else out.to(dtype)


class _HalfStep(torch.autograd.Function):
    """(a, b) -> (b, a + f(b)), keeping nothing but random states; the parameters of f are inputs of the node.

    So gradients reach the parameters through autograd itself, hooks and frozen layers included, and are
    accumulated and freed one half-step at a time.
    """

    @staticmethod
    def forward(ctx, run, f, a, b, *params):
        ctx.run, ctx.f = run, f
        ctx.save_for_backward(*params)  # autograd then refuses weights that changed since
        ctx.replays = []
        y = torch.empty_like(a)
        try:
            for part_a, part_b, part_y in zip(a.chunk(run.chunks), b.chunk(run.chunks), y.chunk(run.chunks)):
                replay = Replay(b.device)
                with run.autocast():
                    out = _checked(f, part_b.to(run.dtype))
                replay.settle()
                ctx.replays.append(replay)
                torch.add(part_a, run.rounded(out, a.dtype), out=part_y)
        finally:
            torch.clear_autocast_cache()
        if run.exact and y.numel():
            run.reached = torch.maximum(run.reached, torch.linalg.vector_norm(y, float("inf")).to(run.reached.dtype))
        return b, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_b, grad_y):
        run, f, params = ctx.run, ctx.f, ctx.saved_tensors
        b, y = run.streams
        needs_b = ctx.needs_input_grad[3]
        a = torch.empty_like(y) if run.borrowed else y
        grad_in = torch.empty_like(b) if needs_b else None
        # The replay runs on stand-ins of the parameters: hooks of the real ones see only the finished gradient.
        names = [name for name, p in f.named_parameters() if p.requires_grad]
        stand_ins = {name: p.detach().requires_grad_() for name, p in zip(names, params, strict=True)}
        parts = list(zip(*(t.chunk(run.chunks) for t in (b, y, a, grad_b, grad_y, grad_in if needs_b else b))))
        try:
            # Last part first: the order in which autograd would add up the parts' gradients.
            for replay, (part_b, part_y, part_a, part_gb, part_gy, part_gi) in zip(ctx.replays[::-1], parts[::-1]):
                x = part_b.detach().to(run.dtype).requires_grad_(needs_b)
                with replay.again(), run.autocast(), frozen_statistics(f), torch.enable_grad():
                    out = torch.func.functional_call(f, stand_ins, (x,))
                torch.sub(part_y, run.rounded(out.detach(), y.dtype), out=part_a)
                if out.requires_grad:
                    inputs = [x, *stand_ins.values()] if needs_b else list(stand_ins.values())
                    _refuse_other_leaves(f, out, inputs)
                    torch.autograd.backward(out, part_gy.to(out.dtype), inputs=inputs)
                if needs_b:
                    torch.add(part_gb, 0 if x.grad is None else x.grad, out=part_gi)
                del out, x
        finally:
            torch.clear_autocast_cache()
        run.borrowed = max(run.borrowed - 1, 0)
        run.streams = (a, b) if any(ctx.needs_input_grad[2:4]) else None
        return None, None, grad_y, grad_in, *(p.grad for p in stand_ins.values())


class _KeepStreams(torch.autograd.Function):
    """The end of a rebuilt pass: keeps both streams and, in backward, hands them to the last half-step."""

    @staticmethod
    def forward(ctx, run, a, b):
        ctx.run = run
        ctx.save_for_backward(a, b)
        return a, b

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_a, grad_b):
        ctx.run.streams = ctx.saved_tensors
        ctx.run.borrowed = 2
        return None, grad_a, grad_b


def _checked(f: nn.Module, x: Tensor) -> Tensor:
    out = f(x)
    if out.shape != x.shape:
        raise ValueError(
            f"{type(f).__name__} must keep the shape of its input in a reversible layer, "
            f"but maps {tuple(x.shape)} to {tuple(out.shape)}"
        )
    return out


def _refuse_other_leaves(f: nn.Module, out: Tensor, inputs: list[Tensor]):
    """Raise if gradients of `out` should also reach a tensor that is neither f's input nor its parameter."""
    known = {id(t) for t in inputs}
    seen, todo = set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad" and id(node.variable) not in known:
            raise RuntimeError(
                f"{type(f).__name__} uses a tensor of shape {tuple(node.variable.shape)} that needs a gradient but is "
                "neither its input nor its parameter; register it as a parameter, or set_reversible(False)"
            )
        todo.extend(parent for parent, _ in node.next_functions)
