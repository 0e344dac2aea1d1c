"""A corpus: which files hold the text, and which of them are kept for validation.

A document is one file. How the text is split into training and validation text is part of the corpus (and of the
cache key), because two runs are only comparable on the same split.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from parallel_attn.errors import SettingsError

CHUNK_BYTES = 1 << 20  # text is read in pieces: one giant file needs no more memory than a small one
HOLDOUT = 20  # one part in twenty (5 %) is validation text
SPLITS = ("train", "val")

SPLIT_BY_FILE = f"files with sha256(name) % {HOLDOUT} == 0"
SPLIT_TAIL = f"last 1/{HOLDOUT} of the tokens"
SPLIT_GIVEN = "own files"


@dataclass(frozen=True)
class SourceFile:
    """One document. `name` is relative (posix, without the corpus' own place): it decides order and split."""

    name: str
    path: Path

    @property
    def name_bytes(self) -> bytes:
        return os.fsencode(self.name)  # file names need not be valid UTF-8

    @property
    def held_out(self) -> bool:
        """Whether the split by file gives this file to validation; depends on the name alone."""
        return int.from_bytes(hashlib.sha256(self.name_bytes).digest(), "big") % HOLDOUT == 0


def is_regular(path: Path) -> bool:
    """Whether a file lies here; a link to nothing is none. OSError where that cannot be told."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def find_files(root: Path, suffix: str, leave_out=lambda folder: False) -> list[SourceFile]:
    """All files below `root` whose name ends in `suffix` (any case), sorted by relative posix path.

    Links to folders are followed, each real folder once, so that a loop of links ends. `leave_out(name)` drops folders.
    Raises OSError for a folder that cannot be listed: text must not go missing in silence.
    """

    def stop(error: OSError):
        raise error

    found, seen = [], set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=stop):
        identity = os.stat(folder)
        if (identity.st_dev, identity.st_ino) in seen:
            folders.clear()
            continue
        seen.add((identity.st_dev, identity.st_ino))
        folders[:] = sorted(name for name in folders if not leave_out(name))  # sorted: which link comes first is fixed
        for name in names:
            path = Path(folder, name)
            if name.lower().endswith(suffix) and is_regular(path):
                found.append(SourceFile(path.relative_to(root).as_posix(), path))
    return sorted(found, key=lambda file: file.name_bytes)


class Corpus:
    """Base of all corpora. A subclass has its own `Config` dataclass (the schema of its YAML) and finds its files.

    The files are looked up once per object, so that check, key and tokens speak of the same list.
    """

    def __init__(self, config):
        self.config = config

    # What a subclass says

    def find(self, split: str) -> list[SourceFile]:
        """The files the settings name for "train" and, where the user names them apart, for "val" (else an empty list).

        Raises SettingsError where they cannot be found.
        """
        raise NotImplementedError

    def label(self, split: str) -> str:
        """`key=value` of the setting that names this split, for messages."""
        raise NotImplementedError

    # What every corpus has

    @property
    def cache_dir(self) -> str | None:
        return self.config.cache_dir

    @cached_property
    def _split(self) -> tuple[str, dict[str, list[SourceFile]]]:
        files, own = self.find("train"), self.find("val")
        if own:
            # A folder may well contain the file that val_path picks out of it: that file is validation text only.
            held_out = {os.path.realpath(file.path) for file in own}
            train = [file for file in files if os.path.realpath(file.path) not in held_out]
            if files and not train:
                raise SettingsError(f"{self.label('train')}: every file is also in {self.label('val')}; name others")
            return SPLIT_GIVEN, {"train": train, "val": own}
        train = [file for file in files if not file.held_out]
        val = [file for file in files if file.held_out]
        if len(files) >= HOLDOUT and _has_bytes(train) and _has_bytes(val):
            return SPLIT_BY_FILE, {"train": train, "val": val}
        return SPLIT_TAIL, {"train": files, "val": []}

    @property
    def split_rule(self) -> str:
        """SPLIT_GIVEN, SPLIT_BY_FILE, or SPLIT_TAIL: then validation is cut off the end of the training tokens."""
        return self._split[0]

    def sources(self, split: str) -> list[SourceFile]:
        """The documents of a split ("train" or "val") in their order. Under SPLIT_TAIL "val" has none of its own."""
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: one of {', '.join(SPLITS)}")
        return self._split[1][split]

    def files(self, split: str) -> list[Path]:
        """Paths of `sources(split)`."""
        return [source.path for source in self.sources(split)]

    def check(self) -> None:
        """Stop before any work where the text cannot be used. Cheap: lists and opens the files, reads none of them.

        Raises SettingsError: nothing there, not readable, or no bytes in all files together. No collective.
        """
        for split in SPLITS:
            files = self.sources(split)
            size = 0
            for source in files:
                try:
                    with open(source.path, "rb") as handle:
                        size += os.fstat(handle.fileno()).st_size
                except OSError as error:
                    raise self._unreadable(split, source, error) from error
            if files and size == 0:
                where = files[0].path if len(files) == 1 else f"{len(files)} files"
                raise SettingsError(f"{self.label(split)}: {where} with 0 bytes; give files that hold text")

    def chunks(self, split: str, source: SourceFile) -> Iterator[bytes]:
        """The bytes of a document exactly as they are on disk, in pieces of at most CHUNK_BYTES."""
        try:
            with open(source.path, "rb") as handle:
                while chunk := handle.read(CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise self._unreadable(split, source, error) from error

    def _unreadable(self, split: str, source: SourceFile, error: OSError) -> SettingsError:
        reason = f"cannot read {source.path} ({error.strerror})"
        return SettingsError(f"{self.label(split)}: {reason}; give files that this user may read")


def _has_bytes(files: list[SourceFile]) -> bool:
    return any(os.stat(file.path).st_size for file in files)
