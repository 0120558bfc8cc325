"""What single entries of a weight add to y and to grad_x, and their gradients, in linear layers and convolutions alike.

All are products of a sparse matrix (O, R) with what the weight multiplies, (R, places): x transposed, or the windows of
a convolution written out. Some places come by at a time, so that they stay in the cache and are small beside the
weight. The operators are PyTorch's to see (torch.library), because what is inside depends on the indices' numbers.

Shapes: x, grad_x (B, C, H, W), y, grad (B, O, Ho, Wo), H = W = 1 for a linear layer; values, k numbers of any shape.
"""

import importlib
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_arch.ops.plain_convolution import Geometry, arithmetic
from lean_arch.ops.sparse_linear import plans
from lean_arch.ops.sparse_linear.plans import Matrix

ROOMS = {"torch": "portable", "triton": "kernels"}
SCRATCH = {True: 2**18, False: 2**24}  # numbers that come by at once, on a CPU (1 MiB of float32) and elsewhere
Part = tuple[slice, slice, slice]  # images, rows and columns of the output


def room(backend: str):
    """The module that holds a backend's products with a sparse matrix."""
    return importlib.import_module(f"lean_arch.ops.sparse_linear.{ROOMS[backend]}")


def parts(y: Tensor, inputs: int) -> Iterator[tuple[slice, list[Part]]]:
    """Some images and the parts of their outputs, each a few places; `inputs` R is what the weight has at a place."""
    images, outputs, height, width = y.shape
    most = SCRATCH[not y.is_cuda] // max(inputs, outputs, 1)
    wide = max(min(width, most), 1)
    high = max(min(height, most // wide), 1)
    some = max(most // max(height * width, 1), 1)
    for image in range(0, images, some):
        at = slice(image, min(image + some, images))
        yield (
            at,
            [
                (at, slice(h, min(h + high, height)), slice(w, min(w + wide, width)))
                for h, w in itertools.product(range(0, height, high), range(0, width, wide))
            ],
        )


def scratch_bytes(y: Tensor, x: Tensor, values: int, kernel: Sequence[int]) -> tuple[int, int, int]:
    """The most that `sparse_forward`, `sparse_input_gradient` and `sparse_values_gradient` hold besides results."""
    width, size = x.shape[1] * math.prod(kernel), arithmetic(y.dtype, y.device).itemsize
    image, some = next(parts(y, width), (slice(0), []))
    places = max((math.prod(at.stop - at.start for at in part) for part in some), default=0)
    columns = (width + y.shape[1]) * places * size
    ordered, sums = values * size, (image.stop - image.start) * x[:1].numel() * max(size, 4)
    return columns, columns + ordered + sums, columns + ordered


def overlap(tap: int, stride: int, padding: int, dilation: int, size: int, at: slice) -> tuple[slice, slice]:
    """Which outputs of `at` a tap has something to read for, counted from at.start, and where it reads."""
    shift = tap * dilation - padding
    first, last = max(at.start, -(shift // stride)), min(at.stop, (size - 1 - shift) // stride + 1)
    last = max(first, last)
    read = slice(first * stride + shift, max((last - 1) * stride + shift + 1, 0), stride) if last > first else slice(0)
    return slice(first - at.start, last - at.start), read


def windows(kernel: Sequence[int], geometry: Geometry, x: Tensor, part: Part) -> Iterator[tuple]:
    """(i, j, outputs of the part, numbers of x) for every tap, as pairs of slices for height and width."""
    sides = list(zip(geometry.stride, geometry.padding, geometry.dilation, x.shape[2:], part[1:]))
    for i, j in itertools.product(*map(range, kernel)):
        (out_h, in_h), (out_w, in_w) = (overlap(tap, *side) for tap, side in zip((i, j), sides))
        yield i, j, (out_h, out_w), (in_h, in_w)


def flat(y: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    """A part of a map as a contiguous matrix (O, places)."""
    some = y[part[0], :, part[1], part[2]]
    some = some[:, :, 0, 0].t() if some.shape[2] == some.shape[3] == 1 else some.transpose(0, 1)
    return torch.empty(some.shape, dtype=dtype, device=y.device).copy_(some).flatten(1)


def written_out(x: Tensor, kernel: Sequence[int], geometry: Geometry, part: Part, dtype: torch.dtype) -> Tensor:
    """What the weight multiplies for a part of the outputs: a contiguous matrix (R, places)."""
    if math.prod(kernel) == 1 and geometry.stride == (1, 1) and geometry.padding == (0, 0):
        return flat(x, part, dtype)
    lengths = [at.stop - at.start for at in part]
    out = x.new_zeros(x.shape[1], *kernel, *lengths, dtype=dtype)
    for i, j, to, at in windows(kernel, geometry, x, part):
        out[:, i, j, :, *to] = x[part[0], :, *at].transpose(0, 1)
    return out.view(x.shape[1] * math.prod(kernel), math.prod(lengths))


def add_back(sums: Tensor, columns: Tensor, kernel: Sequence[int], geometry: Geometry, part: Part) -> None:
    """What `written_out` undoes, added up: sums (images of the part, C, H, W) += columns (R, places)."""
    lengths = [at.stop - at.start for at in part]
    columns = columns.view(sums.shape[1], *kernel, *lengths)
    for i, j, to, at in windows(kernel, geometry, sums, part):
        sums[:, :, *at] += columns[:, i, j, :, *to].transpose(0, 1)


def unpacked(x: Tensor, y: Tensor, where, size, kernel, geometry, transposed) -> tuple[Geometry, Matrix]:
    geometry = Geometry(tuple(geometry[:2]), tuple(geometry[2:4]), tuple(geometry[4:6]), geometry[6])
    shape = plans.Shape(y.shape[1], x.shape[1], math.prod(kernel), geometry.groups)
    return geometry, plans.matrix(where, size, shape, transposed)


@torch.library.custom_op("lean_arch::sparse_forward", mutates_args=("y",))
def sparse_forward(
    y: Tensor,
    x: Tensor,
    values: Tensor,
    where: list[Tensor],
    size: list[int],
    kernel: list[int],
    geometry: list[int],
    backend: str,
) -> None:
    """y += the layer with the entries for a weight, of x."""
    geometry, entries = unpacked(x, y, where, size, kernel, geometry, False)
    dtype = arithmetic(y.dtype, y.device)
    values = entries.sorted(values).to(dtype)
    for _, some in parts(y, x.shape[1] * math.prod(kernel)):
        for part in some:
            out = room(backend).product(entries, values, written_out(x, kernel, geometry, part, dtype))
            lengths = [at.stop - at.start for at in part]
            y[part[0], :, part[1], part[2]] += out.view(len(out), *lengths).transpose(0, 1)


@torch.library.custom_op("lean_arch::sparse_input_gradient", mutates_args=("grad_x",))
def sparse_input_gradient(
    grad_x: Tensor,
    grad: Tensor,
    values: Tensor,
    where: list[Tensor],
    size: list[int],
    kernel: list[int],
    geometry: list[int],
    backend: str,
) -> None:
    """grad_x += that of `sparse_forward`."""
    geometry, entries = unpacked(grad_x, grad, where, size, kernel, geometry, True)
    dtype = arithmetic(grad.dtype, grad.device)
    values = entries.sorted(values).to(dtype)
    for images, some in parts(grad, grad_x.shape[1] * math.prod(kernel)):
        sums = torch.zeros_like(grad_x[images], dtype=torch.promote_types(dtype, torch.float32))
        for part in some:
            columns = room(backend).product(entries, values, flat(grad, part, dtype))
            add_back(sums, columns, kernel, geometry, part)
        grad_x[images] += sums


@torch.library.custom_op("lean_arch::sparse_values_gradient", mutates_args=())
def sparse_values_gradient(
    grad: Tensor,
    x: Tensor,
    where: list[Tensor],
    size: list[int],
    kernel: list[int],
    geometry: list[int],
    backend: str,
) -> Tensor:
    """(k,), summed in float32 or float64."""
    geometry, entries = unpacked(x, grad, where, size, kernel, geometry, False)
    dtype = arithmetic(grad.dtype, grad.device)
    rows = entries.rows()
    sums = grad.new_zeros(len(rows), dtype=torch.promote_types(dtype, torch.float32))
    for _, some in parts(grad, x.shape[1] * math.prod(kernel)):
        for part in some:
            columns = written_out(x, kernel, geometry, part, dtype)
            sums += room(backend).sampled_product(entries, rows, flat(grad, part, dtype), columns)
    return entries.unsorted(sums)


@sparse_forward.register_fake
def _(y, x, values, where, size, kernel, geometry, backend):
    pass


@sparse_input_gradient.register_fake
def _(grad_x, grad, values, where, size, kernel, geometry, backend):
    pass


@sparse_values_gradient.register_fake
def _(grad, x, where, size, kernel, geometry, backend):
    numbers = len(where[0]) * (math.prod(size) * math.prod(kernel) if size else 1)
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad.new_empty(numbers, dtype=wide)


@register_flop_formula(torch.ops.lean_arch.sparse_forward)
def _forward_flops(y_shape, x_shape, values_shape, *others, **more) -> int:
    return 2 * math.prod(values_shape) * y_shape[0] * math.prod(y_shape[2:])


@register_flop_formula(torch.ops.lean_arch.sparse_input_gradient)
def _input_flops(grad_x_shape, grad_shape, values_shape, *others, **more) -> int:
    return _forward_flops(grad_shape, grad_x_shape, values_shape)


@register_flop_formula(torch.ops.lean_arch.sparse_values_gradient)
def _values_flops(grad_shape, x_shape, *others, out_shape=None, **more) -> int:
    return _forward_flops(grad_shape, x_shape, out_shape)
