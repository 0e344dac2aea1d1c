"""Saving: a copy in host memory while training waits, the disk in a thread while it goes on."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_attn.checkpoint.exchange import Exchange
from parallel_attn.checkpoint.files import DTYPES, remove, write_file, write_tensor_file
from parallel_attn.checkpoint.folder import CheckpointFolder
from parallel_attn.checkpoint.index import INDEX_FILE, Entry, Index, Piece
from parallel_attn.errors import CheckpointError, PeerLost
from parallel_attn.mesh import Mesh, lost_contact
from parallel_attn.sharding import ParameterShard

ReadState = Callable[[str], Mapping[str, Tensor]]
"""Full name -> {kind: this tensor rank's shard, whole over the replicas}. A collective over the data axis."""


@dataclass
class Job:
    """One save on its way to the disk."""

    step: int
    tensors: dict[str, Tensor]
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    meta: dict[str, Any]
    texts: dict[str, str]
    done: Path | None = None
    finite: bool = True
    problem: Exception | None = None
    thread: threading.Thread | None = field(default=None, repr=False)


class Saver:
    """Writes the checkpoints of one run. All ranks make one, save at the same steps and wait at the end.

    shards: the records of all parameters by full name. keep: how many whole, finite checkpoints stay.
    on_saved(step, folder, finite) is called on the first rank, from the thread, when a checkpoint is published; tick() on
    every rank, from the thread, as bytes are written.

    Raises CheckpointError on every rank when the folder cannot be used by one of them.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        mesh: Mesh,
        shards: Mapping[str, ParameterShard],
        keep: int,
        on_saved: Callable[[int, Path, bool], None] = lambda step, folder, finite: None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.mesh, self.shards, self.keep = folder, mesh, dict(shards), keep
        self.on_saved, self.tick = on_saved, tick
        self.exchange = Exchange(mesh.world, "checkpoint writer")
        self.writers = assign_writers(self.shards, mesh.data.degree)
        self.job: Job | None = None
        self._buffers: dict[str, Tensor] = {}
        self._token = self._open()

    def _open(self) -> str:
        """Prepares the folder and makes sure that all ranks see the same one; returns a word of this attempt's own."""
        token, problem = uuid.uuid4().hex[:8], None
        if self.mesh.is_main:
            try:
                self.folder.prepare()
                (self.folder.path / f".{token}.tmp").write_text("")
            except OSError as error:
                problem = f"{self.folder.path} cannot be written ({error.strerror}): free it or choose another run_dir"
        first = self.exchange.gather({"token": token, "problem": problem})[0]
        if first["problem"]:
            raise CheckpointError(first["problem"])
        token, mark = first["token"], self.folder.path / f".{first['token']}.tmp"
        seen = self.exchange.gather(mark.exists())
        if not all(seen):
            missing = ", ".join(str(rank) for rank, found in enumerate(seen) if not found)
            raise CheckpointError(
                f"{self.folder.path} on rank{'s' * (seen.count(False) > 1)} {missing} is not the folder that rank 0 sees: "
                f"checkpoints need a run_dir on storage that all ranks share (or checkpoint.every=0)"
            )
        if self.mesh.is_main:
            remove([mark])
        return token

    def save(self, step: int, read: ReadState, meta: dict[str, Any], texts: dict[str, str] | None = None) -> None:
        """Copies the state to host memory and returns; the disk follows in a thread. An earlier save is waited for.

        meta: for the index. texts: further files by name. Raises CheckpointError when the earlier save failed.
        """
        self.wait()
        tensors, boxes = {}, {}
        for name, shard in self.shards.items():
            if not shard.first_holder:
                continue
            mine = self.writers[name] == self.mesh.data.rank
            for kind, tensor in read(name).items():
                if mine:
                    key = f"{kind}/{name}"
                    tensors[key] = self._copied(key, tensor)
                    boxes[key] = _box(shard)
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream(self.mesh.device).synchronize()
        job = Job(step, tensors, boxes, meta, dict(texts or {}))
        job.thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer", daemon=True)
        self.job = job
        job.thread.start()

    def _copied(self, key: str, tensor: Tensor) -> Tensor:
        """Into a buffer that is kept from save to save (pinned for a device: the copy then runs at the bus's speed)."""
        tensor = tensor.detach()
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

    @property
    def failed(self) -> bool:
        """Whether the save in the thread has failed, as far as this rank knows; never waits."""
        return self.job is not None and self.job.problem is not None

    def wait(self) -> Path | None:
        """Waits for the save in the thread; returns its folder. Raises CheckpointError on every rank, or PeerLost."""
        if self.job is None:
            return None
        self.job.thread.join()
        job, self.job = self.job, None
        if job.problem is not None:
            raise job.problem
        return job.done

    # in the thread

    def _run(self, job: Job) -> None:
        try:
            self._write(job)
        except CheckpointError as error:
            job.problem = error
        except RuntimeError as error:
            if not lost_contact(error):
                job.problem = error
                raise
            job.problem = PeerLost("another rank left or died while a checkpoint was written: its own error is the cause")

    def _write(self, job: Job) -> None:
        temporary = self.folder.temporary(job.step, self._token)
        world = self.mesh.world
        file = f"tensors-{world.rank:05d}-of-{world.degree:05d}.safetensors"
        report: dict[str, Any] = {"problem": None}
        try:
            temporary.mkdir(exist_ok=True)
            if job.tensors:
                checksums, known, finite = write_tensor_file(temporary / file, job.tensors, self.tick)
                dtypes = {key: DTYPES[tensor.dtype] for key, tensor in job.tensors.items()}
                pieces = [[key, *job.boxes[key], checksums[key], dtypes[key]] for key in job.tensors]
                report |= {"file": file, "known": known, "pieces": pieces, "finite": finite}
        except OSError as error:
            report["problem"] = _not_written(temporary / file, error)
        reports = self.exchange.gather(report)
        problem = next((found["problem"] for found in reports if found["problem"]), None)
        if problem is None and self.mesh.is_main:
            try:
                self._publish(job, temporary, reports)
            except OSError as error:
                problem = _not_written(Path(error.filename or temporary), error)
        if self.mesh.is_main and problem is not None:
            remove([temporary])  # the space is needed
            problem = f"{problem}; {self._last()}"
        problem, job.finite = self.exchange.gather([problem, job.finite])[0]
        if problem is not None:
            raise CheckpointError(problem)
        job.done = self.folder.path / f"step-{job.step:08d}"

    def _publish(self, job: Job, temporary: Path, reports: list[dict]) -> None:
        files, found = {}, {}
        for report in reports:
            if "file" not in report:
                continue
            files[report["file"]] = report["known"]
            for key, start, shape, checksum, dtype in report["pieces"]:
                piece = Piece(report["file"], tuple(start), tuple(shape), checksum)
                found.setdefault(key, (dtype, []))[1].append(piece)
        for name, text in job.texts.items():
            files[name] = write_file(temporary / name, text.encode())
        tensors = {}
        for key, (dtype, pieces) in sorted(found.items()):
            shape = self.shards[key.partition("/")[2]].full_shape
            tensors[key] = Entry(shape, dtype, tuple(pieces))
        finite = all(report.get("finite", True) for report in reports)
        index = Index(job.step, finite, tensors, files, job.meta)
        write_file(temporary / INDEX_FILE, index.to_json().encode())
        job.finite = finite
        self.on_saved(job.step, self.folder.publish(temporary, index, self.keep), finite)

    def _last(self) -> str:
        """What there is to go on from, in words."""
        try:
            last = self.folder.newest()
        except CheckpointError as error:
            return str(error)
        return f"the last whole checkpoint is {last.folder}" if last else "no checkpoint was written before"


def assign_writers(shards: Mapping[str, ParameterShard], data_degree: int) -> dict[str, int]:
    """Full name -> the replica that writes this rank's slice of it; bytes are spread evenly, the largest first."""
    load, writers = [0] * data_degree, {}
    for name, shard in sorted(shards.items(), key=lambda item: -_elements(item[1].local_shape())):
        writers[name] = load.index(min(load))
        load[writers[name]] += _elements(shard.local_shape()) if shard.first_holder else 0
    return writers


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _box(shard: ParameterShard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, shape) of this rank's slice in the full tensor."""
    start = [0] * len(shard.full_shape)
    if shard.dim is not None:
        start[shard.dim] = shard.ranges[shard.rank][0]
    return tuple(start), shard.local_shape()


def _not_written(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror or error}): free space or choose another run_dir"
