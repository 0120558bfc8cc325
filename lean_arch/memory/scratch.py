"""Memory that operators of PyTorch's CPU backend take for themselves while they run, beyond their results.

A run on fake tensors sees the results only. Most operators take nothing else; the others follow a rule below, read
off the allocator's events. What convolutions take depends on the processor and on what oneDNN chooses for a shape:
that is looked up by running them (`probe`).
"""

from collections.abc import Callable

import torch

from lean_arch.memory.allocator import mark, recording
from lean_arch.ops import linear_cross_entropy, lsh_attention, sparse_attention  # noqa: F401 (make the operators)
from lean_arch.ops.attention import lsh, portable
from lean_arch.ops.attention.op import products_bytes
from lean_arch.ops.attention.problem import arithmetic
from lean_arch.ops.linear_cross_entropy import portable as cross_entropy
from lean_arch.ops.pattern_text import parse
from lean_arch.ops.sparse_linear import sparse

aten, ours = torch.ops.aten, torch.ops.lean_arch


def rule(func, args: tuple, kwargs: dict, out) -> int:
    """Scratch bytes of one call: the most it holds at once, less its results."""
    special = RULES.get(func.overloadpacket)
    if special is not None:
        return special(*args, out=out, **kwargs)
    if torch.Tag.pointwise in func.tags:
        return _converted(args, out)
    return 0


def _converted(args: tuple, out) -> int:
    """Elementwise operators bring operands of another dtype to the common one first."""
    operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if len(operands) < 2 or not isinstance(out, torch.Tensor):
        return 0
    common = torch.result_type(operands[0], operands[1])
    return sum(x.numel() * common.itemsize for x in operands if x.dim() and x.dtype != common and x.dtype != torch.bool)


def _copied(*tensors: torch.Tensor | None) -> int:
    """For operators that work on contiguous tensors."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None and not x.is_contiguous())


def _layer_norm(x, shape, weight, bias, eps, *, out) -> int:
    return _copied(x)


def _layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask, *, out) -> int:
    """Each thread sums the gradients of weight and bias on its own."""
    sums = 2 * torch.get_num_threads() * x[(0,) * (x.dim() - len(shape))].numel() * x.element_size()
    return _copied(grad, x) + (sums if weight is not None else 0)


def _batch_norm(x, *args, out, **kwargs) -> int:
    return 2 * x.shape[1] * 4


def _batch_norm_backward(grad, x, *args, out, **kwargs) -> int:
    return x.numel() * x.element_size()


def _mean(x, *args, out, **kwargs) -> int:
    """16-bit inputs are summed in float32, from a copy."""
    return 4 * (x.numel() + out.numel()) if x.element_size() < 4 else 0


def _roll(x, shifts, dims=(), *, out) -> int:
    """One dimension after the other."""
    return x.numel() * x.element_size() if len(shifts) > 1 else 0


def _attention_tile(q, k) -> tuple[int, int]:
    queries = q.shape[2]
    return min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries), min(512, k.shape[2])


def _attention(q, k, v, *args, out, **kwargs) -> int:
    """Each thread: a tile of scores (also rounded, for 16-bit inputs), its row maxima and sums, its result."""
    rows, columns = _attention_tile(q, k)
    rounded = rows * columns * q.element_size() if q.element_size() < 4 else 0
    accumulated = max(q.element_size(), 4) * rows * (columns + 2 + q.shape[3])
    return torch.get_num_threads() * (accumulated + rounded)


def _attention_backward(grad, q, k, v, result, lse, *args, out, **kwargs) -> int:
    """Each thread: two tiles of scores (also rounded, for 16-bit inputs); and the row sums of one tile."""
    rows, columns = _attention_tile(q, k)
    size = max(q.element_size(), 4)
    rounded = q.element_size() if q.element_size() < 4 else 0
    copied = _copied(grad.transpose(1, 2))
    return copied + torch.get_num_threads() * 2 * rows * columns * (size + rounded) + rows * size


def _sparse_attention(q, k, v, *others, out) -> int:
    pattern, backend = others[-4], others[-1]
    return portable.scratch_bytes(q, k, parse(pattern), backward=False) if backend == "torch" else 0


def _sparse_attention_backward(grad_out, grad_lse, q, k, *others, out) -> int:
    if others[-1] != "torch":
        return 0
    row_sums, results = q.shape[:3].numel() * arithmetic(q.dtype).itemsize, sum(t.nbytes for t in out)
    own = row_sums + portable.scratch_bytes(q, k, parse(others[-4]), backward=True)
    return max(own, products_bytes(q) - results)  # which are not there yet when rows are multiplied


def _lsh_attention(qk, v, *others, out) -> int:
    *problem, backend = others
    return lsh.forward_scratch(qk, *problem) if backend == "torch" else 0


def _lsh_attention_backward(grad_out, qk, v, result, lse, order, *others, out) -> int:
    *problem, backend = others
    return lsh.backward_scratch(qk, order.shape[2], *problem) if backend == "torch" else 0


def _cross_entropy(x, weight, *others, out) -> int:
    *_, dtype, backend = others
    return cross_entropy.scratch_bytes(x, weight, dtype) if backend == "torch" else 0


def _cross_entropy_backward(grad, lse, x, weight, *others, out) -> int:
    *_, dtype, backend, needs = others
    return cross_entropy.scratch_bytes(x, weight, dtype, needs) if backend == "torch" else 0


def _sparse_forward(y, x, values, where, size, kernel, geometry, backend, *, out) -> int:
    return sparse.scratch_bytes(y, x, values.numel(), kernel)[0] if backend == "torch" else 0


def _sparse_input_gradient(grad_x, grad, values, where, size, kernel, geometry, backend, *, out) -> int:
    return sparse.scratch_bytes(grad, grad_x, values.numel(), kernel)[1] if backend == "torch" else 0


def _sparse_values_gradient(grad, x, where, size, kernel, geometry, backend, *, out) -> int:
    return sparse.scratch_bytes(grad, x, out.numel(), kernel)[2] if backend == "torch" else 0


RULES: dict[object, Callable[..., int]] = {
    aten.native_layer_norm: _layer_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten.native_batch_norm: _batch_norm,
    aten.native_batch_norm_backward: _batch_norm_backward,
    aten.mean: _mean,
    aten.roll: _roll,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    ours.sparse_attention: _sparse_attention,
    ours.sparse_attention_backward: _sparse_attention_backward,
    ours.lsh_attention: _lsh_attention,
    ours.lsh_attention_backward: _lsh_attention_backward,
    ours.linear_cross_entropy: _cross_entropy,
    ours.sparse_forward: _sparse_forward,
    ours.sparse_input_gradient: _sparse_input_gradient,
    ours.sparse_values_gradient: _sparse_values_gradient,
    ours.linear_cross_entropy_backward: _cross_entropy_backward,
}

# operator -> its arguments whose first dimension is the batch
PROBED = {aten.convolution: (0,), aten.convolution_backward: (0, 1)}
SMALL = (2, 4)  # batches that tell how each block grows; more than the threads, among which one image is not split
MANY = 16  # images that one thread convolves 1x1 by oneDNN; fewer it leaves to a matrix product, which takes no scratch
_seen = {}  # key of a probe -> its allocator events in bytes


class Probe:
    """A call of a PROBED operator, to look up or to rebuild: tensors become (shape, stride, dtype)."""

    def __init__(self, func, args: tuple, kwargs: dict):
        self.batch = args[0].shape[0]
        self.whole = self._key(func, args, kwargs, self.batch)
        weight = args[len(PROBED[func.overloadpacket])]
        by_number = torch.get_num_threads() == 1 and weight.shape[2:].numel() == 1
        least = MANY if by_number and self.batch >= MANY else 0
        self.small = [least + batch for batch in SMALL]
        few = self.batch <= self.small[-1]
        self.keys = [self.whole] if few else [self._key(func, args, kwargs, batch) for batch in self.small]

    @staticmethod
    def _key(func, args, kwargs, batch):
        plain = []
        for position, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                shape = (batch, *value.shape[1:]) if position in PROBED[func.overloadpacket] else tuple(value.shape)
                value = (torch.Tensor, shape, value.stride(), value.dtype)
            plain.append(tuple(value) if isinstance(value, list) else value)
        return func, tuple(plain), tuple(kwargs.items())

    def scratch(self) -> int:
        events = [_seen[key] for key in self.keys]
        if len(events) == len(SMALL):
            reach = (self.batch - self.small[0]) / (self.small[1] - self.small[0])
            events = [[round(low + (high - low) * reach) for low, high in zip(*events, strict=True)]]
        level = peak = 0
        for nbytes in events[0]:
            level += nbytes
            peak = max(peak, level)
        return peak - level


def probe(calls: list[Probe]) -> list[int]:
    """Scratch bytes of `calls`.

    Runs each distinct one on zeros with a batch of 4 or 20 at most and extends what it took to the batch in question:
    every block grows linearly. Where two small batches go by different kernels, the batch in question is run.
    """
    _look_up(calls)
    for call in calls:
        if len({len(_seen[key]) for key in call.keys}) > 1:
            call.keys = [call.whole]
    _look_up(calls)
    return [call.scratch() for call in calls]


def _look_up(calls: list[Probe]) -> None:
    missing = list(dict.fromkeys(key for call in calls for key in call.keys if key not in _seen))
    if missing:
        _run(missing)


def _run(keys: list[tuple]) -> None:
    with recording() as events, torch.no_grad():
        for number, (func, args, kwargs) in enumerate(keys):
            real = [_zeros(*arg[1:]) if isinstance(arg, tuple) and arg[:1] == (torch.Tensor,) else arg for arg in args]
            mark(f"start {number}")
            out = func(*real, **dict(kwargs))
            mark("end")
            del real, out
    into = None
    for event in events:
        if event.mark is not None:
            into = _seen.setdefault(keys[int(event.mark.split()[1])], []) if event.mark != "end" else None
        elif into is not None:
            into.append(event.nbytes)


def _zeros(shape, stride, dtype) -> torch.Tensor:
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    return torch.zeros(extent, dtype=dtype).as_strided(shape, stride)
