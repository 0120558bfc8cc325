"""What the layers take, checked before anything is computed; each refusal is a ValueError of one sentence.

Shapes: as in op.py.
"""

import torch
from torch import Tensor

from lean_arch.ops.sparse_linear import plans
from lean_arch.ops.sparse_linear.reference import Updates, is_quantised
from lean_arch.ops.sparse_linear.structures import Blocks, Shape, Structure, has_numbers

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_updates(weight: Tensor, updates: Updates, groups: int = 1) -> None:
    """Indices are looked at once, and again when they have changed."""
    if weight.requires_grad:
        raise ValueError("weight requires a gradient, but gets none here; weight.requires_grad_(False) freezes it")
    for number, (values, structure) in enumerate(updates):
        if not isinstance(structure, Structure):
            kind = type(structure).__name__
            raise ValueError(f"updates[{number}] has {kind} for a structure; Columns, Rows, Blocks and Entries work")
        _check_structure(structure, tuple(weight.shape), groups)
        indices = _indices(structure)
        wanted = structure.values_shape(weight.shape, groups)
        if not isinstance(values, Tensor) or tuple(values.shape) != wanted or values.dtype not in DTYPES:
            found = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"values of updates[{number}] must be a float tensor {wanted}, got {found}")
        for name, tensor in (("values", values), ("index", indices[0])):
            if tensor.device != weight.device:
                raise ValueError(f"{name} of updates[{number}] is on {tensor.device}, but weight is on {weight.device}")


def _indices(structure: Structure) -> list[Tensor]:
    return [structure.rows, structure.cols] if isinstance(structure, Blocks) else [structure.index]


def _check_structure(structure: Structure, weight_shape: Shape, groups: int) -> None:
    indices, kind = _indices(structure), type(structure)
    if not all(isinstance(index, Tensor) and has_numbers(index) for index in indices):
        structure.check(weight_shape, groups)
        return
    size = (tuple(structure.size),) if kind is Blocks else ()
    plans.once(_check_numbers, indices, kind, size, weight_shape, groups)


def _check_numbers(*described) -> bool:
    *indices, kind, size, weight_shape, groups = described
    kind(*indices, *size).check(weight_shape, groups)
    return True


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(f"weight must be a tensor (O, C), got {_found(weight)}")
    if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be a tensor (..., {weight.shape[1]}) for weight {_found(weight)}, got {_found(x)}")
    _check_kinds(x, weight, bias)


def check_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 4:
        raise ValueError(f"weight must be a tensor (O, C / groups, kh, kw), got {_found(weight)}")
    if not isinstance(groups, int) or groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"groups {groups!r} must be a whole number that divides the {weight.shape[0]} outputs")
    inputs = weight.shape[1] * groups
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] != inputs:
        raise ValueError(f"x must be a tensor (B, {inputs}, H, W) for weight {_found(weight)}, got {_found(x)}")
    _check_kinds(x, weight, bias)


def _check_kinds(x, weight, bias):
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}; float32, float16, bfloat16 and float64 work")
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        raise ValueError(f"bias must be a tensor ({weight.shape[0]},), got {_found(bias)}")
    autocast = torch.is_autocast_enabled("cpu" if x.is_meta else x.device.type)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")
        mixed = autocast and torch.float64 not in (x.dtype, tensor.dtype)
        if tensor.dtype != x.dtype and not mixed and not is_quantised(tensor):
            raise ValueError(f"{name} is {tensor.dtype}, but x is {x.dtype}; outside autocast they must be the same")


def check_embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> int | None:
    """padding_idx, counted from 0."""
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(f"weight must be a tensor (V, D), got {_found(weight)}")
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids must be a tensor of int64 or int32, got {getattr(ids, 'dtype', type(ids).__name__)}")
    if ids.device != weight.device:
        raise ValueError(f"ids are on {ids.device}, but weight is on {weight.device}")
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx {padding_idx} must be a row of weight, {-rows} to {rows - 1}")
    return None if padding_idx is None else padding_idx % rows


def pairs_of(stride, padding, dilation, weight: Tensor) -> list:
    """Each as a pair; padding may stay "same"."""
    if padding == "valid":
        padding = 0
    if isinstance(padding, str) and padding != "same":
        raise ValueError(f"padding {padding!r} does not exist; whole numbers, 'valid' and 'same' do")
    found = []
    for name, value, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if value == "same":
            if found[0] != (1, 1):
                raise ValueError(f"padding 'same' needs stride 1, got {stride!r}")
            found.append(value)
            continue
        pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
        if len(pair) != 2 or not whole or min(pair) < least:
            raise ValueError(f"{name} {value!r} must be a whole number or a pair of them, {least} or more")
        found.append(pair)
    return found


def check_window(x: Tensor, weight: Tensor, padding, dilation) -> None:
    for name, size, k, p, d in zip(("height", "width"), x.shape[2:], weight.shape[2:], padding, dilation):
        if size + 2 * p < d * (k - 1) + 1:
            raise ValueError(
                f"weight spans {d * (k - 1) + 1} numbers of x's {name}, which is {size + 2 * p} with padding {p}; "
                "it takes as many or more"
            )


def _found(value) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
