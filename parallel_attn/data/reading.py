"""Files by the ending of their name: what they hold, and their bytes unpacked in pieces of bounded size."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from parallel_attn.data.corpus import CHUNK_BYTES

KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
COMPRESSED = (".gz", ".zst")
SUFFIXES = tuple(kind + packed for kind in KINDS for packed in ("", *COMPRESSED))


class Unreadable(ValueError):
    """A file's content is broken or not what its name says; the message names the file, the place, and a cure."""


def compression(name: str) -> str:
    """ ".gz", ".zst" or "" by the ending of a file's name, in any case."""
    return next((suffix for suffix in COMPRESSED if name.lower().endswith(suffix)), "")


def kind(name: str) -> str:
    """text, json (one object per line), csv or parquet; any other ending counts as text."""
    inner = name[: len(name) - len(compression(name))]
    return KINDS.get(Path(inner).suffix.lower(), "text")


def read_text(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked, in pieces of about CHUNK_BYTES (zst: of at most a block more).

    Raises Unreadable for broken or truncated compressed data (an end that is missing is not an end of text), OSError
    where the file itself cannot be read.
    """
    packed = compression(path.name)
    done = 0
    try:
        for chunk in {"": _plain, ".gz": _gzip, ".zst": _zstd}[packed](path):
            yield chunk
            done += len(chunk)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        reason = "ends too early" if isinstance(error, EOFError) else f"broken data, {_line(error)}"
        raise Unreadable(
            f"{path}: {packed[1:]} {reason}, in the text behind byte {done}; copy it again or leave it out"
        ) from error


def _plain(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            yield chunk


def _gzip(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            yield chunk


def _zstd(path: Path) -> Iterator[bytes]:
    """Any number of frames. By hand, since the library's own stream takes a missing end for the end."""
    import zstandard

    piece = 1 << 14  # a compressed byte can stand for thousands: small pieces in keep the pieces out small
    with open(path, "rb") as handle:
        frame = None
        while data := handle.read(piece):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise zlib.error(str(error)) from error  # one name for what both libraries complain of
                data = b""
                if frame.eof:
                    data, frame = frame.unused_data, None
        if frame is not None:
            raise EOFError("zst frame without an end")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
