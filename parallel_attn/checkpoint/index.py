"""index.json: what a checkpoint holds and where each piece of it lies.

    step-00000500/
        index.json                     this; the last file to be written
        tensors-00000-of-00004.safetensors, ...   one for each rank that writes
        tokenizer.json

A tensor is called KIND/NAME: the kind (`master`, `exp_avg`, `exp_avg_sq`) and the full name of the parameter. It is stored
in pieces, each one slice of the full tensor that one rank wrote; together they are the full tensor, each element once.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parallel_attn.errors import CheckpointError

FORMAT, VERSION = "parallel_attn checkpoint", 1
INDEX_FILE = "index.json"
KINDS = ("master", "exp_avg", "exp_avg_sq")
"""The parameters as the optimizer keeps them (float32, or float64 for fp64), and AdamW's two moments."""


@dataclass(frozen=True)
class Piece:
    """A slice of a full tensor: the box of `shape` that begins at `start`, under the tensor's name in `file`."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int

    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """One full tensor. `dtype`: safetensors' word, such as F32."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Index:
    """meta: what training wants to know again (plain values): step, data position, configuration, layout, ...
    files: bytes and crc32 (of tensor files: of their header) of every file beside the index."""

    step: int
    finite: bool
    tensors: dict[str, Entry]
    files: dict[str, dict[str, int]]
    meta: dict[str, Any] = field(default_factory=dict)

    def names(self, kind: str = "master") -> dict[str, tuple[int, ...]]:
        """Full name -> full shape of all parameters."""
        prefix = f"{kind}/"
        return {key.removeprefix(prefix): entry.shape for key, entry in self.tensors.items() if key.startswith(prefix)}

    def pieces_of(self, file: str) -> Iterator[tuple[str, Piece]]:
        for key, entry in self.tensors.items():
            for piece in entry.pieces:
                if piece.file == file:
                    yield key, piece

    def parameters(self) -> int:
        """Parameters of the model as one process would hold it."""
        return sum(math.prod(shape) for shape in self.names().values())

    def total_bytes(self) -> int:
        return sum(file["bytes"] for file in self.files.values())

    def to_json(self) -> str:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({"checksum": _checksum(content), **content}, separators=(",", ":"), allow_nan=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Raises CheckpointError, naming the file, for one that is missing, changed, or of another format."""
        path = folder / INDEX_FILE
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: it is not JSON any more") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the index of a checkpoint")
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has format version {content.get('version')}, this release reads version {VERSION}"
            )
        checksum = content.pop("checksum", None)
        if checksum != _checksum(content):
            raise CheckpointError(f"{path} is damaged: its checksum does not match")
        tensors = {
            key: Entry(
                tuple(entry["shape"]),
                entry["dtype"],
                tuple(
                    Piece(piece["file"], tuple(piece["start"]), tuple(piece["shape"]), piece["crc32"])
                    for piece in entry["pieces"]
                ),
            )
            for key, entry in content["tensors"].items()
        }
        index = cls(content["step"], content["finite"], tensors, content["files"], content["meta"])
        index._check_complete(path)
        return index

    def _check_complete(self, path: Path) -> None:
        """Every full tensor is there in all its elements (the pieces of one tensor never overlap)."""
        for key, entry in self.tensors.items():
            if sum(piece.elements() for piece in entry.pieces) != math.prod(entry.shape):
                raise CheckpointError(f"{path}: the pieces of {key} are not the whole tensor")


def _checksum(content: dict) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"
