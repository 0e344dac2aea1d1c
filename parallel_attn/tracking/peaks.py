"""Bytes of given tensors, and the peaks that the system and the device report."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages under a tensor; those of the inner tensors for a wrapper (DTensor, AsyncCollectiveTensor).

    Tensors without memory of their own kind (meta, fake, sparse and other layouts) yield nothing.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, torch.Tensor):  # a DTensor also hands over its mesh
                yield from storages(inner)
    elif tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta":  # the storage's own device: a FakeTensor claims that of the real one
            yield storage


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages under `tensors`: a view, or a tied weight, counts once; a slice counts whole."""
    sizes = {id(storage): storage for tensor in tensors for storage in storages(tensor)}
    return sum(storage.nbytes() for storage in sizes.values())


def process_peak_bytes() -> int:
    """The most resident memory (RSS) this process has had, in bytes; approximate: it sees pages, not tensors."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Not ru_maxrss: on Linux a new program inherits the peak of the process that started it.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes(device: torch.device | str) -> int | None:
    """The most memory the caching allocator has had in use on a CUDA device, in bytes; None on the CPU."""
    device = torch.device(device)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
