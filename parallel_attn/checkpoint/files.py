"""Files that are whole or absent: written, flushed, renamed; safetensors files with a checksum of every tensor."""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

CHUNK_BYTES = 4 << 20
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_tensor_file(
    path: Path, tensors: dict[str, Tensor], tick: Callable[[], None] = lambda: None
) -> tuple[dict[str, int], dict[str, int], bool]:
    """Writes contiguous CPU tensors as safetensors and flushes them to the disk; `tick` is called now and then.

    Returns (crc32 of each tensor's bytes, {bytes, crc32 of the header} of the file, whether all values are finite).
    Raises OSError.
    """
    header, position = {}, 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors aligned
    head = len(text).to_bytes(8, "little") + text
    checksums, finite = {}, True
    with open(path, "wb", buffering=0) as file, _flushing(file.fileno()):
        write_all(file, head)
        for key, tensor in tensors.items():
            checksum = 0
            for part in _parts(tensor):  # looked at three times while it is in the cache
                low, high = torch.aminmax(part)  # a NaN is both
                finite = finite and bool(low.isfinite() & high.isfinite())
                content = memoryview(part.view(torch.uint8).numpy())
                checksum = zlib.crc32(content, checksum)
                write_all(file, content)
                tick()
            checksums[key] = checksum
    return checksums, {"bytes": len(head) + position, "crc32": zlib.crc32(head)}, finite


@contextmanager
def _flushing(descriptor: int) -> Iterator[None]:
    """Flushes a file to the disk, while it is written and at the end: the disk works while checksums are computed."""
    over = threading.Event()

    def flush() -> None:
        while not over.wait(0.05):
            try:
                os.fdatasync(descriptor)
            except OSError:
                return  # the last one meets it again

    thread = threading.Thread(target=flush, name="checkpoint-flush", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    os.fsync(descriptor)


def write_all(file, content: bytes | memoryview) -> None:
    """A raw write may take less than it is given: on a disk that fills up, the next one raises."""
    content = memoryview(content)
    while content:
        content = content[file.write(content) :]


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.view(-1)
    return iter(flat.split(CHUNK_BYTES // flat.element_size())) if flat.numel() else iter(())


def read_header(path: Path) -> tuple[bytes, dict[str, dict]]:
    """The first bytes of a safetensors file, up to the data, and what they say. Raises OSError, ValueError."""
    with open(path, "rb") as file:
        size = file.read(8)
        length = int.from_bytes(size, "little")
        if len(size) < 8 or length > os.fstat(file.fileno()).st_size - 8:
            raise ValueError("its header is cut off")
        text = file.read(length)
    return size + text, json.loads(text)


def checksums_of(path: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(tensor, crc32 of its bytes) for each tensor of a safetensors file whose name begins with `prefix`, read once.

    Raises OSError, ValueError.
    """
    head, header = read_header(path)
    with open(path, "rb") as file:
        for key, entry in header.items():
            if not key.startswith(prefix):
                continue
            start, stop = entry["data_offsets"]
            file.seek(len(head) + start)
            checksum, left = 0, stop - start
            while left:
                chunk = file.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise ValueError("it is cut off")
                checksum = zlib.crc32(chunk, checksum)
                left -= len(chunk)
            yield key, checksum


def write_file(path: Path, content: bytes) -> dict[str, int]:
    """Writes and flushes a small file; returns its bytes and crc32. Raises OSError."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def replace_file(path: Path, content: bytes) -> None:
    """Puts a small file in place of what is there, whole or not at all. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        write_file(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Makes the names in a folder outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(paths: Iterable[Path]) -> None:
    """Removes files and folders; what is gone already, or cannot go, is left."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
