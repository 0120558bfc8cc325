"""Measuring, planning and saving memory, for any nn.Module."""

from lean_arch.memory.ledger import Report, format_bytes, parse_bytes
from lean_arch.memory.measure import measure

__all__ = ["Report", "format_bytes", "measure", "parse_bytes"]
