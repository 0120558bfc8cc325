"""What one adapter adds to one layer.

Shapes: weight (O, C) or (O, C, *kernel), O outputs, C inputs a group; x and y the layer's input and output.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Part(nn.Module):
    """The trained values of one adapter at one layer; a layer keeps them in its child `adapters`, by adapter name.

    A part changes the layer's weight by `updates`, or adds `added(x)` to its output, or both.

    Attributes:
        strength: factor of what is added; 0 switches it off.
        merged: whether it is in the layer's weight just now, so that nothing is added besides.
    """

    def __init__(self):
        super().__init__()
        self.strength, self.merged = 1.0, False

    @property
    def acts(self) -> bool:
        return self.strength != 0 and not self.merged

    def updates(self) -> list[tuple[Tensor, object]]:
        """Pairs of values and where in the weight they are added (`lean_arch.ops.sparse_linear`), times strength."""
        return []

    def added(self, x: Tensor, layer: nn.Module) -> Tensor | None:
        """What is added to the layer's output for input `x`, times strength."""
        return None

    def changes(self, weight: Tensor, groups: int) -> Iterator[tuple[Tensor | None, Tensor]]:
        """What merging adds to the weight, times strength: pairs of flat positions (None: everywhere) and values."""
        for values, structure in self.updates():
            yield structure.positions(weight.shape, groups).flatten(), values.flatten()

    def facts(self) -> dict:
        """What a file says of the part besides its tensors, as JSON can hold it."""
        return {}

    def scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.strength == 1 else tensor * self.strength


def dense(weight: Tensor) -> Tensor:
    """The numbers of a weight that may be quantised."""
    return weight.dequantize() if is_quantised(weight) else weight


def is_quantised(weight: Tensor) -> bool:
    """Whether it is one of torchao's tensors, which stand for numbers that they hold in fewer bits."""
    return type(weight.data) is not Tensor and hasattr(weight, "dequantize")


def value_dtype(weight: Tensor) -> torch.dtype:
    """Of the values trained beside `weight`: its own, or float32 where that is no number with a fraction."""
    return weight.dtype if weight.dtype.is_floating_point else torch.float32
