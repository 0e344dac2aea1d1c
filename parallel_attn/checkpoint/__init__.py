"""Checkpoints: one canonical format, saved atomically beside training, loaded at any layout."""

from parallel_attn.checkpoint.exchange import Exchange
from parallel_attn.checkpoint.folder import CHECKPOINTS, Checkpoint, CheckpointFolder, find, newest_in
from parallel_attn.checkpoint.index import KINDS, Index
from parallel_attn.checkpoint.load import Reader, require_same_parameters
from parallel_attn.checkpoint.save import Saver

__all__ = [
    "CHECKPOINTS",
    "KINDS",
    "Checkpoint",
    "CheckpointFolder",
    "Exchange",
    "Index",
    "Reader",
    "Saver",
    "find",
    "newest_in",
    "require_same_parameters",
]
