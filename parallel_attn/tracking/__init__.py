"""Tracking room: metrics on disk, W&B, console, memory meters, throughput."""

from parallel_attn.tracking.config import TrackingConfig, WandbConfig
from parallel_attn.tracking.jsonl import JsonlWriter, read_jsonl, write_summary
from parallel_attn.tracking.memory import MemoryMeter
from parallel_attn.tracking.peaks import device_peak_bytes, process_peak_bytes, tensor_bytes
from parallel_attn.tracking.throughput import mfu, peak_flops
from parallel_attn.tracking.tracker import Tracker

__all__ = [
    "JsonlWriter",
    "MemoryMeter",
    "Tracker",
    "TrackingConfig",
    "WandbConfig",
    "device_peak_bytes",
    "mfu",
    "peak_flops",
    "process_peak_bytes",
    "read_jsonl",
    "tensor_bytes",
    "write_summary",
]
