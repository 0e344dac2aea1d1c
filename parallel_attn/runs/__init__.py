"""What is done with a model after training: opened, generated from, exported, imported, converted."""

from parallel_attn.runs.opened import OpenedRun, open_run
from parallel_attn.runs.written import write_run

__all__ = ["OpenedRun", "open_run", "write_run"]
