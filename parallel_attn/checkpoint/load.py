"""Loading: any slice of any full tensor, whatever the layout that wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor

from parallel_attn.checkpoint.folder import Checkpoint
from parallel_attn.checkpoint.index import KINDS, Piece
from parallel_attn.errors import CheckpointError
from parallel_attn.sharding import ParameterShard


class Reader:
    """Reads slices of the tensors of a checkpoint; a context manager that holds its files open."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, object] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.clear()

    def parameter(
        self, name: str, shard: ParameterShard, kinds: Sequence[str] = KINDS
    ) -> dict[str, Tensor]:
        """{kind: the slice that `shard` describes} of one parameter, on the CPU. Moments that a checkpoint leaves out
        (of an imported model) are zeros. Raises CheckpointError."""
        start = [0] * len(shard.full_shape)
        if shard.dim is not None:
            start[shard.dim] = shard.ranges[shard.rank][0]
        found = {}
        for kind in kinds:
            key = f"{kind}/{name}"
            if kind != "master" and key not in self.checkpoint.index.tensors:
                found[kind] = torch.zeros_like(found["master"])
            else:
                found[kind] = self.slice(key, tuple(start), shard.local_shape())
        return found

    def slice(self, key: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The box of `shape` that begins at `start` of a full tensor, put together from the pieces that it meets."""
        entry = self.checkpoint.index.tensors[key]
        result: Tensor | None = None
        for piece in entry.pieces:
            box = _overlap(start, shape, piece)
            if box is None:
                continue
            there = tuple(slice(a - o, b - o) for (a, b), o in zip(box, piece.start))
            part = self._read(piece.file, key, there)
            if part.shape == torch.Size(shape):
                return part
            here = tuple(slice(a - o, b - o) for (a, b), o in zip(box, start))
            if result is None:
                result = torch.empty(shape, dtype=part.dtype)
            result[here] = part
        if result is None:
            raise CheckpointError(f"{self.checkpoint.folder}: no piece of {key} covers {start} + {shape}")
        return result

    def _read(self, file: str, key: str, where: tuple[slice, ...]) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self.checkpoint.folder / file
        try:
            if file not in self._files:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            whole = self._files[file].get_slice(key)
            return whole[where] if where else self._files[file].get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error


def _overlap(start: tuple[int, ...], shape: tuple[int, ...], piece: Piece) -> list[tuple[int, int]] | None:
    """Where a wanted box and a piece meet, as (first, last + 1) for each dim of the full tensor; None where they do not."""
    box = []
    for first, size, other, other_size in zip(start, shape, piece.start, piece.shape):
        low, high = max(first, other), min(first + size, other + other_size)
        if low >= high:
            return None
        box.append((low, high))
    return box


def require_same_parameters(checkpoint: Checkpoint, shards: Mapping[str, ParameterShard], key: str) -> None:
    """Raises CheckpointError where the model has other parameters than the checkpoint. `key`: for the message."""
    saved, wanted = checkpoint.index.names(), {name: shard.full_shape for name, shard in shards.items()}
    where = f"{key} ({checkpoint.folder})"
    for name, shape in wanted.items():
        if name not in saved:
            raise CheckpointError(f"{where} has no parameter {name}, which this model has: model and attention differ")
        if saved[name] != shape:
            raise CheckpointError(f"{where} has {name} of shape {saved[name]}, this model one of {shape}")
    extra = sorted(set(saved) - set(wanted))
    if extra:
        raise CheckpointError(f"{where} has the parameter {extra[0]}, which this model has not: model and attention differ")
