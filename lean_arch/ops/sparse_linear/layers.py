"""The dense products of a linear layer and of a 2-d convolution, in place and in slices, in what the CPU is fast in.

A CPU without 16-bit arithmetic multiplies 16-bit tensors in float32, slice by slice, several times as fast (one core of
an AMD EPYC with AVX2, torch 2.14, 1576 tokens, 768 to 3072, bfloat16: 132 ms against F.linear's 849).

Shapes: linear: x (T, C), weight (O, C), y (T, O); convolution: x (B, C, H, W), weight (O, C / groups, kh, kw),
y (B, O, Ho, Wo). Inputs and outputs are dimension 1 in both.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_arch.ops import plain_convolution
from lean_arch.ops.plain_convolution import Geometry, arithmetic, slices
from lean_arch.ops.sparse_linear.reference import is_quantised, plain

TILE = 2**17  # numbers of a weight that are converted at once, or an eighth of it where that is more


def tiles(weight: Tensor, dtype: torch.dtype, groups: int = 1) -> Iterator[slice]:
    """Of the outputs, whole groups each: all of them where `weight` is of `dtype` and needs no copy."""
    outputs, unit = weight.shape[0], weight.shape[0] // groups if groups > 1 else 1
    most = weight.numel() if weight.dtype == dtype else max(weight.numel() // 8, TILE)
    each = max(most // max(weight[0].numel() * unit, 1), 1) * unit
    return (slice(start, min(start + each, outputs)) for start in range(0, outputs, each))


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
        wide = arithmetic(x.dtype, x.device)
        if wide == x.dtype or is_quantised(weight):
            weight = weight if is_quantised(weight) else weight.to(x.dtype)
            return F.linear(x, weight, in_dtype(bias, x.dtype))
        y = x.new_empty(x.shape[0], weight.shape[0])
        for tile in tiles(weight, wide):
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

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """In x's dtype, whatever the others are of."""
        wide, geometry = arithmetic(x.dtype, x.device), self.geometry
        if wide == x.dtype:
            return plain_convolution.forward(x, weight.to(wide), in_dtype(bias, wide), geometry)
        y = x.new_empty(self.output_shape(x, weight))
        for part in slices(x):
            rows = x[part].to(wide)
            for tile in tiles(weight, wide, geometry.groups):
                b = None if bias is None else bias[tile].to(wide)
                some, partly = self.seen(rows, weight, tile)
                y[part, tile] = plain_convolution.forward(some, weight[tile].to(wide), b, partly)
        return y

    def seen(self, x: Tensor, weight: Tensor, tile: slice) -> tuple[Tensor, Geometry]:
        """What of x the outputs of a tile see, and the convolution from there to them."""
        if self.geometry.groups == 1:
            return x, self.geometry
        unit = weight.shape[0] // self.geometry.groups
        first, last = tile.start // unit, tile.stop // unit
        each = weight.shape[1]
        return x[:, first * each : last * each], self.geometry._replace(groups=last - first)

    def input_gradient(self, grad: Tensor, weight: Tensor, x_shape: Sequence[int]) -> Tensor:
        if arithmetic(grad.dtype, grad.device) == grad.dtype:
            return self._input_gradient(grad, weight.to(grad.dtype), x_shape, self.geometry)
        grad_x = grad.new_zeros(x_shape)
        self.add_input_gradient(grad_x, grad, weight)
        return grad_x

    def _input_gradient(self, grad, weight, x_shape, geometry):
        x = grad.new_empty(1).expand(x_shape)  # only its shape is asked for
        return plain_convolution.backward(grad, x, weight, geometry, (True, False, False))[0]

    def add_forward(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        wide = arithmetic(x.dtype, x.device)
        weight = weight.to(wide)
        for part in slices(y):
            y[part] += plain_convolution.forward(x[part].to(wide), weight, None, self.geometry)

    def add_input_gradient(self, grad_x: Tensor, grad: Tensor, weight: Tensor) -> None:
        wide = arithmetic(grad.dtype, grad.device)
        for part in slices(grad_x):
            g, sums = grad[part].to(wide), grad_x.new_zeros(grad_x[part].shape, dtype=wide)
            for tile in tiles(weight, wide, self.geometry.groups):
                some, partly = self.seen(sums, weight, tile)
                some += self._input_gradient(g[:, tile], weight[tile].to(wide), some.shape, partly)
            grad_x[part] += sums

    def weight_gradient(self, grad: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
        wide = arithmetic(x.dtype, x.device)
        weight, needs = x.new_empty(1, dtype=wide).expand(shape), (False, True, False)
        if wide == x.dtype:
            return plain_convolution.backward(grad, x, weight, self.geometry, needs)[1]
        sums = x.new_zeros(shape, dtype=wide)
        for part in slices(x):
            sums += plain_convolution.backward(grad[part].to(wide), x[part].to(wide), weight, self.geometry, needs)[1]
        return sums
