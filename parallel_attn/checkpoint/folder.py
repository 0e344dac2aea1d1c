"""The folder `checkpoints/` of a run: what is published in it, what is left over, what may go.

    step-00000400/  step-00000500/     published: each was renamed to this name when it was whole
    latest                             the name of the newest finite one
    .step-00000600.1a2b3c4d.tmp/       being written, or left over from a kill: never read, swept at the next start
    set-aside-1-step-00000500/         newer than the one that a run was told to go on from
"""

from __future__ import annotations

import re
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path

from parallel_attn.checkpoint.files import checksums_of, flush_folder, read_header, remove, replace_file
from parallel_attn.checkpoint.index import INDEX_FILE, Index
from parallel_attn.errors import CheckpointError

LATEST_FILE = "latest"
CHECKPOINTS = "checkpoints"
_PUBLISHED = re.compile(r"step-\d{8,}")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint whose index is whole and whose files have the sizes that it names."""

    folder: Path
    index: Index

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises CheckpointError, naming the file, for one that is missing or cut off."""
        index = Index.read(folder)
        for name, known in index.files.items():
            path = folder / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} is missing or unreadable ({error.strerror})") from error
            if size != known["bytes"]:
                raise CheckpointError(f"{path} is damaged: {size} bytes instead of {known['bytes']}")
        return cls(folder, index)

    @property
    def step(self) -> int:
        return self.index.step

    def verify(self, part: int = 0, parts: int = 1, prefix: str = "") -> None:
        """Reads files and compares their checksums: every `parts`-th file from the `part`-th, so that ranks can share; only
        tensors whose names begin with `prefix`.

        Raises CheckpointError naming the file and the tensor.
        """
        for name in sorted(self.index.files)[part::parts]:
            path = self.folder / name
            try:
                self._verify_file(name, path, prefix)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
            except ValueError as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error

    def _verify_file(self, name: str, path: Path, prefix: str) -> None:
        if not name.endswith(".safetensors"):
            if zlib.crc32(path.read_bytes()) != self.index.files[name]["crc32"]:
                raise ValueError("its checksum does not match")
            return
        if zlib.crc32(read_header(path)[0]) != self.index.files[name]["crc32"]:
            raise ValueError("the checksum of its header does not match")
        wanted = {key: piece.crc32 for key, piece in self.index.pieces_of(name)}
        for key, checksum in checksums_of(path, prefix):
            if wanted.get(key) != checksum:
                raise ValueError(f"the checksum of {key} does not match")

    def text(self, name: str) -> str:
        """A text file beside the index. Raises CheckpointError."""
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
        if name not in self.index.files or zlib.crc32(content) != self.index.files[name]["crc32"]:
            raise CheckpointError(f"{path} is damaged: its checksum does not match")
        return content.decode()


class CheckpointFolder:
    """The checkpoints of one run. Reading needs no lock: what has a published name is whole."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def published(self) -> list[Path]:
        """By step, oldest first."""
        try:
            found = [path for path in self.path.iterdir() if _PUBLISHED.fullmatch(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror})") from error
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]))

    def newest(self) -> Checkpoint | None:
        """The newest finite checkpoint; None where nothing was published.

        Raises CheckpointError where it is damaged, offering the one before it.
        """
        for path in reversed(self.published()):
            checkpoint = self.opened(path)
            if checkpoint.index.finite:
                return checkpoint
        return None

    def opened(self, path: Path) -> Checkpoint:
        """Raises CheckpointError, offering the whole checkpoint before it, for one that is damaged."""
        try:
            return Checkpoint.open(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self.offer(path)}") from error

    def offer(self, damaged: Path) -> str:
        """What to do instead of reading `damaged`, in words."""
        step = int(damaged.name.rpartition("-")[2])
        for path in reversed(self.published()):
            if int(path.name.rpartition("-")[2]) < step:
                try:
                    if Checkpoint.open(path).index.finite:
                        return f"the one before it is whole: checkpoint.resume={path}"
                except CheckpointError:
                    pass
        return f"no whole checkpoint stands before it in {self.path}: start anew in another run_dir"

    # what only the first rank does

    def prepare(self) -> None:
        """Makes the folder and sweeps what a kill left over. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        remove(path for path in self.path.iterdir() if path.name.startswith("."))

    def temporary(self, step: int, token: str) -> Path:
        return self.path / f".{step_name(step)}.{token}.tmp"

    def publish(self, temporary: Path, index: Index, keep: int) -> Path:
        """Gives a finished checkpoint its name, moves `latest`, and lets old ones go. Raises OSError."""
        flush_folder(temporary)
        final = self.path / step_name(index.step)
        if final.exists():  # the same step done again; `latest` points into nothing for a moment: nobody reads it to resume
            final.rename(self.path / f".{final.name}.{uuid.uuid4().hex[:8]}.old")
        temporary.rename(final)
        flush_folder(self.path)
        if index.finite:
            replace_file(self.path / LATEST_FILE, f"{final.name}\n".encode())
        self.rotate(keep)
        return final

    def rotate(self, keep: int) -> None:
        """Keeps the newest `keep` whole and finite checkpoints and whatever is newer than the oldest of them."""
        finite = []
        for path in self.published():
            try:
                if Checkpoint.open(path).index.finite:
                    finite.append(path)
            except CheckpointError:
                pass
        if len(finite) < keep:
            return remove(path for path in self.path.iterdir() if path.name.endswith(".old"))
        published = self.published()
        for path in published[: published.index(finite[-keep])]:
            path.rename(self.path / f".{path.name}.{uuid.uuid4().hex[:8]}.old")  # never half a checkpoint by its name
        remove(path for path in self.path.iterdir() if path.name.endswith(".old"))

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames the checkpoints after a step that the run goes on from: they belong to a course that it left."""
        moved = []
        for path in self.published():
            if int(path.name.partition("-")[2]) > step:
                number = 1
                while (target := self.path / f"set-aside-{number}-{path.name}").exists():
                    number += 1
                moved.append(path.rename(target))
        if moved:
            replace_file(self.path / LATEST_FILE, f"{step_name(step)}\n".encode())
        return moved


def newest_in(run_dir: Path) -> Checkpoint | None:
    """The newest finite checkpoint of a run folder; None where it has none. Raises CheckpointError."""
    return CheckpointFolder(run_dir / CHECKPOINTS).newest()


def find(path: str | Path) -> Checkpoint:
    """The checkpoint that a path means: itself, or the newest of a run folder or of its `checkpoints/`.

    Raises CheckpointError.
    """
    path = Path(path).expanduser()
    if _PUBLISHED.fullmatch(path.name) or (path / INDEX_FILE).exists():
        return CheckpointFolder(path.parent).opened(path)
    for folder in (path / CHECKPOINTS, path):
        found = CheckpointFolder(folder).newest()
        if found is not None:
            return found
    reason = "holds no whole, finite checkpoint" if path.is_dir() else "is not a folder"
    raise CheckpointError(f"{path} {reason}: name a run folder or a folder step-... in its {CHECKPOINTS}/")
