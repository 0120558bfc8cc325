"""Measuring, planning and saving memory, for any nn.Module."""

from lean_arch.memory.checkpoint import apply_checkpointing
from lean_arch.memory.ledger import Report, format_bytes, parse_bytes
from lean_arch.memory.measure import measure
from lean_arch.memory.plan import BudgetError, plan

__all__ = ["BudgetError", "Report", "apply_checkpointing", "format_bytes", "measure", "parse_bytes", "plan"]
