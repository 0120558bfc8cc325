"""Fine-tuning of any nn.Module by adapters: little is trained, little is kept, and the base comes back as it was."""

from lean_arch.adapters import bias, ladder, lora, memory, sparse  # noqa: F401 (they register their methods)
from lean_arch.adapters.attach import activate, attach, detach, list_adapters, trainable_parameters
from lean_arch.adapters.files import load, save
from lean_arch.adapters.insert_memory import insert_memory
from lean_arch.adapters.memory import SlotCounts, count_slots
from lean_arch.adapters.merge import merge, unmerge
from lean_arch.adapters.regrow import regrow
from lean_arch.adapters.row_adam import RowAdam
from lean_arch.adapters.summary import summary

__all__ = [
    "RowAdam",
    "SlotCounts",
    "activate",
    "attach",
    "count_slots",
    "detach",
    "insert_memory",
    "list_adapters",
    "load",
    "merge",
    "regrow",
    "save",
    "summary",
    "trainable_parameters",
    "unmerge",
]
