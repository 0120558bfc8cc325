"""The dense products of a linear layer and of a 2-d convolution, in place and in slices, in what the CPU is fast in.

A CPU without 16-bit arithmetic multiplies 16-bit tensors in float32, slice by slice, several times as fast (one core of
an AMD EPYC with AVX2, torch 2.14, 1576 tokens, 768 to 3072, bfloat16: 132 ms against F.linear's 849).

Shapes: linear: x (T, C), weight (O, C), y (T, O); convolution: x (B, C, H, W), weight (O, C / groups, kh, kw),
y (B, O, Ho, Wo). Inputs and outputs are dimension 1 in both.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops import plain_convolution
from lean_arch.ops.depthwise.reference import layout_of
from lean_arch.ops.plain_convolution import Geometry, arithmetic, slices
from lean_arch.ops.sparse_linear.reference import is_quantised, plain

WHOLE = 2**20  # numbers of a weight, from which on an eighth of it at a time is converted or laid out anew


def tiles(numbers: int, size: int) -> Iterator[slice]:
    """Of a weight's dimension: all of it, or eighths where the weight is large."""
    each = size if numbers < WHOLE else max(size // 8, 1)
    return (slice(start, min(start + each, size)) for start in range(0, size, each))


def in_dtype(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


@dataclass(frozen=True)
class Linear:
    def flat(self, x: Tensor) -> Tensor:
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    def output_shape(self, x: Tensor, weight: Tensor) -> Sequence[int]:
        return *x.shape[:-1], weight.shape[0]

    def numbers(self) -> list[int]:
        return [1, 1, 0, 0, 1, 1, 1]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """In x's dtype, whatever the others are of."""
        if is_quantised(weight):  # its own kernels take what is of the dtype that it stands for
            return F.linear(x.to(weight.dtype), weight, in_dtype(bias, weight.dtype)).to(x.dtype)
        wide = arithmetic(x.dtype, x.device)
        if wide == x.dtype:
            return F.linear(x, weight.to(x.dtype), in_dtype(bias, x.dtype))
        y = x.new_empty(x.shape[0], weight.shape[0])
        for tile in tiles(weight.numel(), weight.shape[0]):
            w, b = weight[tile].to(wide), None if bias is None else bias[tile].to(wide)
            for part in slices(x, width=max(x.shape[1], len(w))):
                y[part, tile] = F.linear(x[part].to(wide), w, b)
        return y

    def input_gradient(self, grad: Tensor, weight: Tensor, x_shape: Sequence[int]) -> Tensor:
        return self.forward(grad, plain(weight).t())

    def add_forward(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        wide = arithmetic(x.dtype, x.device)
        if wide == x.dtype:
            y.addmm_(x, weight.to(wide).t())
            return
        weight = weight.to(wide)
        for part in slices(x, width=max(x.shape[1], len(weight))):
            y[part] += F.linear(x[part].to(wide), weight)

    def add_input_gradient(self, grad_x: Tensor, grad: Tensor, weight: Tensor) -> None:
        self.add_forward(grad_x, grad, weight.t())

    def weight_gradient(self, grad: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
        wide = arithmetic(x.dtype, x.device)
        if wide == x.dtype:
            return grad.t() @ x
        sums = x.new_zeros(shape, dtype=wide)
        for part in slices(x, width=max(x.shape[1], grad.shape[1])):
            sums.addmm_(grad[part].to(wide).t(), x[part].to(wide))
        return sums


@dataclass(frozen=True)
class Convolution:
    geometry: Geometry

    def flat(self, x: Tensor) -> Tensor:
        return x

    def numbers(self) -> list[int]:
        """The geometry as a list: stride, padding, dilation, groups."""
        stride, padding, dilation, groups = self.geometry
        return [*stride, *padding, *dilation, groups]

    def output_shape(self, x: Tensor, weight: Tensor) -> Sequence[int]:
        stride, padding, dilation, _ = self.geometry
        sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation)
        return x.shape[0], weight.shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)

    def pieces(self, weight: Tensor, dim: int) -> Iterator[tuple[Tensor, slice, slice, Geometry]]:
        """Parts of the weight by outputs (dim 0), inputs (1) or groups, and which channels of y and of x they join."""
        groups, every = self.geometry.groups, slice(None)
        if groups == 1:
            for tile in tiles(weight.numel(), weight.shape[dim]):
                ours, theirs = (tile, every) if dim == 0 else (every, tile)
                yield weight[ours, theirs], ours, theirs, self.geometry
            return
        outputs, inputs = weight.shape[0] // groups, weight.shape[1]
        for tile in tiles(weight.numel(), groups):
            ours, theirs = (slice(tile.start * each, tile.stop * each) for each in (outputs, inputs))
            yield weight[ours], ours, theirs, self.geometry._replace(groups=tile.stop - tile.start)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """In x's dtype, whatever the others are of."""
        if not x.is_cpu:
            return plain_convolution.forward(x, weight.to(x.dtype), in_dtype(bias, x.dtype), self.geometry)
        y = torch.empty(self.output_shape(x, weight), dtype=x.dtype, memory_format=layout_of(x))
        self.put_forward(y, x, weight, bias, Tensor.copy_)
        return y

    def add_forward(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        self.put_forward(y, x, weight, None, Tensor.add_)

    def put_forward(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, put: Callable) -> None:
        wide = arithmetic(x.dtype, x.device)
        for part in slices(x if x.numel() > y.numel() else y):
            rows = x[part].to(wide)
            for w, ours, theirs, geometry in self.pieces(weight, 0):
                b = None if bias is None else bias[ours].to(wide)
                put(y[part, ours], plain_convolution.forward(rows[:, theirs], w.to(wide), b, geometry))

    def input_gradient(self, grad: Tensor, weight: Tensor, x_shape: Sequence[int]) -> Tensor:
        if not grad.is_cpu:
            return self._of_input(grad, weight.to(grad.dtype), x_shape, self.geometry)
        grad_x = torch.empty(x_shape, dtype=grad.dtype, memory_format=layout_of(grad))
        self.put_input_gradient(grad_x, grad, weight, Tensor.copy_)
        return grad_x

    def add_input_gradient(self, grad_x: Tensor, grad: Tensor, weight: Tensor) -> None:
        self.put_input_gradient(grad_x, grad, weight, Tensor.add_)

    def put_input_gradient(self, grad_x: Tensor, grad: Tensor, weight: Tensor, put: Callable) -> None:
        wide = arithmetic(grad.dtype, grad.device)
        for part in slices(grad_x if grad_x.numel() > grad.numel() else grad):
            rows = grad[part].to(wide)
            for w, ours, theirs, geometry in self.pieces(weight, 1):
                some = grad_x[part, theirs]
                put(some, self._of_input(rows[:, ours], w.to(wide), some.shape, geometry))

    @staticmethod
    def _of_input(grad, weight, x_shape, geometry):
        x = grad.new_empty(1).expand(x_shape)  # only its shape is asked for
        return plain_convolution.backward(grad, x, weight, geometry, (True, False, False))[0]

    def weight_gradient(self, grad: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
        wide = arithmetic(x.dtype, x.device)
        weight, needs = x.new_empty(1, dtype=wide).expand(shape), (False, True, False)
        if wide == x.dtype:
            return plain_convolution.backward(grad, x, weight, self.geometry, needs)[1]
        sums = x.new_zeros(shape, dtype=wide)
        for part in slices(x if x.numel() > grad.numel() else grad):
            sums += plain_convolution.backward(grad[part].to(wide), x[part].to(wide), weight, self.geometry, needs)[1]
        return sums
