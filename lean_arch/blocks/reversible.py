"""Reversible stacks: the backward pass rebuilds every layer's input from the stack's output, exactly.

    y1 = x1 + f(x2)        x2 = y2 - g(y1)
    y2 = x2 + g(y1)        x1 = y1 - f(x2)

The coupling is that of RevNets (Gomez et al. 2017, arXiv 1707.04585) and Reformer (Kitaev et al. 2020, arXiv
2001.04451). Floating-point sums do not invert exactly, so the streams are carried as fixed-point integers, whose sums
do: they return bit for bit at any depth, under any autocast. f and g see them as floating-point numbers.

Shapes: both streams (B, ...), alike; f and g map (B, ...) to (B, ...).
"""

import contextlib
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lean_arch.ops.derivatives import once_differentiable
from lean_arch.ops.linear import rowwise_linears
from lean_arch.ops.replay import Replay, autocast_as_now, module_twin

# 18 fractional bits: 4e-6, finer than bf16 and fp16 arithmetic, and than LayerScale's usual start of 1e-5
FIXED_POINT = {torch.float32: (torch.int32, 18), torch.float64: (torch.int64, 44)}
LIMIT = 4096.0  # two numbers below it add up without overflow


def to_fixed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as fixed-point integers, those of streams of `dtype` (float32: int32, 2^-18; float64: int64, 2^-44)."""
    integer, bits = FIXED_POINT[dtype]
    return x.to(dtype, copy=True).mul_(2.0**bits).round_().to(integer)


def to_float(fixed: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of `dtype` nearest to fixed-point integers."""
    return fixed.to(dtype).mul_(2.0 ** -FIXED_POINT[dtype][1])


class ReversiblePair(nn.Module):
    """Two modules (f, g) of one reversible layer: (x1, x2) -> (y1, y2). See ReversibleSequence."""

    def __init__(self, f: nn.Module, g: nn.Module):
        super().__init__()
        for module in (f, g):
            if not isinstance(module, nn.Module):
                raise TypeError(f"pairs must be of two modules, got {module!r}; wrap a function in an nn.Module")
        self.f = f
        self.g = g

    @torch.jit.unused
    def forward(self, x1: Tensor, x2: Tensor, run: "_Stored") -> tuple[Tensor, Tensor]:
        x2, y1 = run.half_step(self.f, x1, x2)
        return run.half_step(self.g, x2, y1)


class ReversibleSequence(nn.ModuleList):
    """A stack of reversible layers whose training memory does not grow with depth.

    Args:
        pairs: (f, g) modules, one pair a layer; each maps its input to a tensor of the same shape. Gradients flow
            to their input and to their parameters; a tensor that needs a gradient may not be captured otherwise.
        exact: carry the streams in fixed point (2^-18 in float32, 2^-44 in float64; 16-bit streams as float32), so
            that they return bit for bit. Where a number reaches 4096 both results are NaN, on the CPU with a warning.
            False: floating-point sums, whose inversion drifts with depth.
        chunks: run f and g on up to this many parts of the batch, one after the other; what one layer needs for its
            backward falls with it. Only for f and g that treat batch items apart (no BatchNorm).
        least_chunk: elements of a stream below which a part is not made smaller; small matrices are slow.

    `reversible` (True) may be switched off: same arithmetic, activations stored by autograd, no replay.

    Dropout, autocast and BatchNorm statistics are replayed as they were; f and g may change no other state of their
    own (as legacy spectral_norm does), nor their input. Second derivatives through a reversible
    run raise RuntimeError. `state_dict` keys are `0.f...`, `0.g...`, `1.f...`.
    """

    def __init__(self, pairs: Iterable = (), exact: bool = True, chunks: int = 1, least_chunk: int = 1):
        for name, number in (("chunks", chunks), ("least_chunk", least_chunk)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more, got {number!r}")
        super().__init__(p if isinstance(p, ReversiblePair) else ReversiblePair(*p) for p in pairs)
        self.exact = exact
        self.chunks = chunks
        self.least_chunk = least_chunk
        self.reversible = True

    def __getitem__(self, index):
        if not isinstance(index, slice):
            return super().__getitem__(index)
        part = type(self)(list(self._modules.values())[index], self.exact, self.chunks, self.least_chunk)
        part.reversible = self.reversible
        return part.train(self.training)

    def forward(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(x1, x2) -> (y1, y2), all of one shape and floating dtype. Raises ValueError when they differ."""
        if torch.jit.is_scripting():
            return self._traceable(streams)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            return self._traceable(streams)
        return self._run(streams)

    @torch.jit.unused
    @torch.compiler.disable  # the replay must repeat the forward's own kernels, bit for bit
    def _run(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if isinstance(streams, Tensor) or len(streams) != 2:
            raise ValueError("streams must be a pair of tensors (x1, x2); for one input x pass (x, x)")
        x1, x2 = streams
        if x1.shape != x2.shape or x1.dtype != x2.dtype or not x1.is_floating_point():
            raise ValueError(
                "streams must be two floating tensors of one shape and dtype, "
                f"got {tuple(x1.shape)} {x1.dtype} and {tuple(x2.shape)} {x2.dtype}"
            )
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x1, x2, *self.parameters()))
        rebuilt = self.reversible and needs_grad and len(self) > 0
        run = (_Rebuilt if rebuilt else _Stored)(self, x1)
        a, b = run.enter(x1, x2)
        for layer in self:
            a, b = layer(a, b, run)
        if rebuilt:
            a, b = _KeepStreams.apply(run, a, b)
        return run.leave(a, b)

    def _traceable(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The same arithmetic in operations that TorchScript, torch.export and ONNX can follow."""
        dtype = streams[0].dtype
        # TorchScript cannot read FIXED_POINT
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        integer = torch.int64 if dtype == torch.float64 else torch.int32
        scale = 2.0**44 if dtype == torch.float64 else 2.0**18
        fixed = [torch.round(x.detach().to(wide) * scale).to(integer) for x in streams]
        a, b = streams[0], streams[1]
        if self.exact:
            a, b = _traceable_value(a, fixed[0], scale), _traceable_value(b, fixed[1], scale)
        for pair in self:
            for half in range(2):
                out = pair.f(b.to(dtype)) if half == 0 else pair.g(b.to(dtype))
                y = a + out.to(a.dtype)
                if self.exact:
                    fixed = [fixed[1], fixed[0] + torch.round(out.detach().to(wide) * scale).to(integer)]
                    y = _traceable_value(y, fixed[1], scale)
                a, b = b, y
        return a.to(dtype), b.to(dtype)


def _traceable_value(y: Tensor, fixed: Tensor, scale: float) -> Tensor:
    """The value of `fixed` with the gradient of `y`."""
    wide = y.to(torch.float64 if fixed.dtype == torch.int64 else torch.float32)
    return fixed.to(wide.dtype) / scale + (wide - wide.detach())


class _Value(torch.autograd.Function):
    """`value`, whose gradient goes to each of `sources` as it is."""

    @staticmethod
    def forward(ctx, value, *sources):
        ctx.dtypes = [source.dtype for source in sources]
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return None, *(grad.to(dtype) for dtype in ctx.dtypes)


class _Stored:
    """One pass over a stack whose activations autograd stores.

    What layers hand on are the streams as floating-point numbers; the fixed-point ones go along in `fixed`.
    """

    def __init__(self, stack: ReversibleSequence, x: Tensor):
        self.exact = stack.exact
        self.chunks = max(min(stack.chunks, x.numel() // stack.least_chunk), 1)
        self.dtype = x.dtype  # what f and g are given and the caller gets
        self.wide = torch.promote_types(x.dtype, torch.float32) if self.exact else x.dtype  # what streams are
        self.share_casts = False  # autograd would add up the parts' gradients of a weight in 16 bits
        self.autocast = autocast_as_now(x.device)
        self.fixed = None  # both streams where the pass has come to
        self.handed = None  # the storages of the floating-point ones
        self.reached = torch.zeros((), device=x.device, dtype=self.wide)  # largest number that was added or came out

    def enter(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        a = self.fix(x1)
        b = a if x1 is x2 else self.fix(x2)
        self.fixed = a, b
        values = self.value(a), self.value(b)
        self._reach(x1.detach())
        self._reach(x2.detach())
        return self._hand_on(*(_Value.apply(value, x) for value, x in zip(values, (x1, x2))))

    def half_step(self, f: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(a, b) -> (b, a + f(b))."""
        self.check_handed(a, b)
        with self.surroundings():
            parts = [self.call(f, part) for part in b.chunk(self.chunks)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not self.exact:
            return self._hand_on(b, a + out)
        y = self.add(out.detach())
        return self._hand_on(b, _Value.apply(y, a, out))

    @contextlib.contextmanager
    def surroundings(self):
        """What f and g run in, the first time and again."""
        try:
            with self.autocast(), rowwise_linears(self.share_casts):
                yield
        finally:
            torch.clear_autocast_cache()

    def leave(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if self.exact and not isinstance(self.reached, FakeTensor):  # which has no number to look at
            within = self.reached < LIMIT
            if type(within) is Tensor and within.is_cpu:  # on an accelerator, to read it would be to wait for it
                if not within:
                    a, b = a * torch.nan, b * torch.nan
                    _warn_out_of_range(self.reached.item())
            else:
                poison = torch.where(within, 1.0, torch.nan)
                a, b = a * poison, b * poison
        return a.to(self.dtype), b.to(self.dtype)

    def call(self, f: nn.Module, part: Tensor) -> Tensor:
        x = part.to(self.dtype)
        before = None if x.is_inference() else x._version
        out = f(x)
        if before is not None and x._version != before:
            raise RuntimeError(f"{type(f).__name__} changes its input in place, which a reversible layer must not")
        if not isinstance(out, Tensor):
            raise TypeError(f"{type(f).__name__} must return a tensor in a reversible layer, got {type(out).__name__}")
        if out.shape != part.shape:
            raise ValueError(
                f"{type(f).__name__} must keep the shape of its input in a reversible layer, "
                f"but maps {tuple(part.shape)} to {tuple(out.shape)}"
            )
        return out

    def fix(self, x: Tensor) -> Tensor:
        return to_fixed(x.detach(), self.wide) if self.exact else x.detach()

    def value(self, fixed: Tensor) -> Tensor:
        return to_float(fixed, self.wide) if self.exact else fixed

    def add(self, out: Tensor) -> Tensor:
        """Moves the streams (a, b) on to (b, a + out); the value of the latter."""
        a, b = self.fixed
        y = a + self.fix(out)
        self.fixed = b, y
        value = self.value(y)
        self._reach(out)
        self._reach(value)
        return value

    def _reach(self, x: Tensor):
        if self.exact and x.numel():
            low, high = x.aminmax()  # NaN if any number is
            self.reached = torch.maximum(self.reached, torch.maximum(-low, high).to(self.wide))

    def _hand_on(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        self.handed = a.untyped_storage()._cdata, b.untyped_storage()._cdata
        return a, b

    def check_handed(self, a: Tensor, b: Tensor):
        if self.handed != (a.untyped_storage()._cdata, b.untyped_storage()._cdata):
            raise RuntimeError(
                "a hook replaced the streams between two reversible layers, which rebuilding them would undo; "
                "hook f or g instead, or hand changed streams to a second ReversibleSequence"
            )


def _warn_out_of_range(reached: float):
    if reached >= LIMIT:  # not NaN
        warnings.warn(
            f"a reversible stream reached {reached:.0f}, beyond {LIMIT:.0f}, so its results are NaN: lower the "
            "learning rate, normalise what f and g return, or take exact=False",
            stacklevel=2,
        )


class _Rebuilt(_Stored):
    """One pass over a stack that keeps only its last streams; each backward walks them back, a half-step at a time."""

    def __init__(self, stack: ReversibleSequence, x: Tensor):
        super().__init__(stack, x)
        self.share_casts = self.chunks > 1  # one 16-bit copy of a weight serves all parts of a half-step
        self.autocast = autocast_as_now(x.device, cache=self.share_casts)
        self.borrowed = 0  # how many of the streams a second backward may ask for again

    def half_step(self, f: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        self.check_handed(a, b)
        return self._hand_on(*_HalfStep.apply(self, f, a, b, *(p for p in f.parameters() if p.requires_grad)))


class _HalfStep(torch.autograd.Function):
    """(a, b) -> (b, a + f(b)), keeping nothing but random states; the parameters of f are inputs of the node.

    So gradients reach the parameters through autograd itself, hooks and frozen layers included, and are
    accumulated and freed one half-step at a time.
    """

    @staticmethod
    def forward(ctx, run, f, a, b, *params):
        ctx.run, ctx.f = run, f
        ctx.save_for_backward(*params)  # autograd then refuses weights that changed since
        ctx.replays, parts = [], []
        with run.surroundings():
            for part in b.chunk(run.chunks):
                replay = Replay(b.device)
                parts.append(run.call(f, part))
                replay.settle()
                ctx.replays.append(replay)
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return b, run.add(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_b, grad_y):
        run, f, params = ctx.run, ctx.f, ctx.saved_tensors
        b, y = run.fixed
        needs_b = ctx.needs_input_grad[3]
        a = torch.empty_like(y) if run.borrowed else y
        grad_in = torch.empty_like(grad_b) if needs_b else None
        # The replay runs on stand-ins of the parameters: hooks of the real ones see only the finished gradient.
        real = [p for p in f.parameters() if p.requires_grad]
        stand_ins = [p.detach().requires_grad_() for p in params]
        twin = module_twin(f, dict(zip(real, stand_ins, strict=True)))
        parts = list(zip(*(t.chunk(run.chunks) for t in (b, y, a, grad_b, grad_y, grad_in if needs_b else b))))
        with run.surroundings():
            # Last part first: the order in which autograd would add up the parts' gradients.
            for replay, (part_b, part_y, part_a, part_gb, part_gy, part_gi) in zip(ctx.replays[::-1], parts[::-1]):
                x = run.value(part_b).detach().to(run.dtype).requires_grad_(needs_b)
                with replay.again(), torch.enable_grad():
                    out = twin(x)
                torch.sub(part_y, run.fix(out), out=part_a)
                if out.requires_grad:
                    inputs = [x, *stand_ins] if needs_b else stand_ins
                    _refuse_other_leaves(f, out, inputs)
                    with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
                        torch.autograd.backward(out, part_gy.to(out.dtype), inputs=inputs)
                if needs_b:
                    torch.add(part_gb, 0 if x.grad is None else x.grad, out=part_gi)
                del out, x
        run.borrowed = max(run.borrowed - 1, 0)
        run.fixed = (a, b) if any(ctx.needs_input_grad[2:4]) else None
        return None, None, grad_y, grad_in, *(p.grad for p in stand_ins)


class _KeepStreams(torch.autograd.Function):
    """The end of a rebuilt pass: keeps both streams and, in backward, hands them to the last half-step."""

    @staticmethod
    def forward(ctx, run, a, b):
        ctx.run = run
        ctx.save_for_backward(*run.fixed)
        run.fixed = None
        return a.view_as(a), b.view_as(b)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_a, grad_b):
        ctx.run.fixed = ctx.saved_tensors
        ctx.run.borrowed = 2
        return None, grad_a, grad_b


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
                "neither its input nor its parameter; register it as a parameter, or set reversible = False"
            )
        todo.extend(parent for parent, _ in node.next_functions)
