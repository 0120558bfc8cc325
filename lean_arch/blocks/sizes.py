"""What constructors ask of the numbers they are given: each refuses in one sentence what no layer could be made of."""

from numbers import Integral, Real

from lean_arch.ops.attention.op import HEAD_SIZES


def check_whole(least: int, **values: int) -> None:
    """Raises ValueError unless each is a whole number, `least` or more."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} {value!r} must be a whole number, {least} or more")


def check_share(**values: float) -> None:
    """Raises ValueError unless each is 0 or more and less than 1."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0 <= value < 1:
            raise ValueError(f"{name} {value!r} must be a share, 0 or more and less than 1")


def check_heads(dim: int, num_heads: int) -> int:
    """The channels of a head. Raises ValueError unless attention takes so many."""
    check_whole(1, dim=dim, num_heads=num_heads)
    size, rest = divmod(dim, num_heads)
    if rest:
        raise ValueError(f"dim {dim} is not a multiple of num_heads {num_heads}")
    if size not in HEAD_SIZES:
        least, most = HEAD_SIZES[0], HEAD_SIZES[-1]
        raise ValueError(f"dim {dim} gives {num_heads} heads of {size} channels; {least} to {most} work")
    return size
