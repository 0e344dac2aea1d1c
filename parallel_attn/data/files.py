"""Corpora made of files: which files hold the text, which of them are kept for validation, and their documents."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from parallel_attn.data.corpus import (
    CHUNK_BYTES,
    HOLDOUT,
    SPLIT_BY_DOCUMENT,
    SPLIT_BY_FILE,
    SPLIT_GIVEN,
    SPLIT_TAIL,
    SPLITS,
    Corpus,
    Document,
    hold_out_documents,
    with_text,
)
from parallel_attn.data.reading import Unreadable, compression, read_text
from parallel_attn.data.records import records
from parallel_attn.data.tail import cut_tail
from parallel_attn.errors import SettingsError

COMPRESSION_RATIO = 4  # of ordinary text under gz, zst and inside parquet; a guess where only a guess is needed


@dataclass(frozen=True)
class SourceFile:
    """One file. `name` is relative (posix, without the corpus' own place): it decides order and split."""

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


def find_files(root: Path, suffix: str | tuple[str, ...], leave_out=lambda folder: False) -> list[SourceFile]:
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


class FileCorpus(Corpus):
    """Base of the corpora whose text lies in files. A plain text file is one document, a record is one document.

    Validation text: the files that the user names apart; else one file in twenty, by the hash of its name, where there
    are at least 20 files; else every 20th document where a file holds records; else the last 5 % of the bytes.
    The files are looked up once per object, so that check, key and tokens speak of the same list.
    """

    # What a subclass says

    def find(self, split: str) -> list[SourceFile]:
        """The files the settings name for "train" and, where the user names them apart, for "val" (else an empty list).

        Raises SettingsError where they cannot be found.
        """
        raise NotImplementedError

    def kind(self, source: SourceFile) -> str:
        """What the file holds: text, json, csv or parquet."""
        return "text"

    @property
    def field(self) -> str:
        """The field of a record that holds its text."""
        return "text"

    # What all of them have

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
        has_records = any(self.kind(file) != "text" for file in files)
        return SPLIT_BY_DOCUMENT if has_records else SPLIT_TAIL, {"train": files, "val": []}

    @property
    def split_rule(self) -> str:
        return self._split[0]

    @property
    def reading(self) -> str:
        has_records = any(self.kind(source) != "text" for split in SPLITS for source in self.sources(split))
        return f"field {self.field}" if has_records else ""

    def sources(self, split: str) -> list[SourceFile]:
        """The files of a split ("train" or "val") in their order. Where documents or the tail are held out, "val" has
        none of its own."""
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: one of {', '.join(SPLITS)}")
        return self._split[1][split]

    def files(self, split: str) -> list[Path]:
        """Paths of `sources(split)`."""
        return [source.path for source in self.sources(split)]

    def check(self) -> None:
        """Lists and opens the files, and reads the first record of the first file with records.

        Raises SettingsError: nothing there, not readable, no bytes in all files together, a field that is not there.
        """
        super().check()
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
            self._peek(split)

    def _peek(self, split: str) -> None:
        """So that all ranks refuse a wrong field alike, before one of them starts to work."""
        for source in self.sources(split):
            kind = self.kind(source)
            packed = kind == "parquet" and compression(source.name)  # would have to be unpacked first
            if kind != "text" and not packed and os.stat(source.path).st_size:
                for _ in self._documents_of(split, source):
                    break
                return

    def documents(self) -> Iterator[Document]:
        self.nulls = 0
        if self.split_rule == SPLIT_TAIL:
            yield from cut_tail(self._whole_texts(), self._text_size)
            return
        found = (
            document
            for split in SPLITS
            for source in self.sources(split)
            for document in map(with_text, self._documents_of(split, source))
            if document is not None
        )
        yield from hold_out_documents(found) if self.split_rule == SPLIT_BY_DOCUMENT else found

    def chunks(self, split: str, source: SourceFile) -> Iterator[bytes]:
        """The bytes of a file exactly as they are on disk, in pieces of at most CHUNK_BYTES."""
        try:
            with open(source.path, "rb") as handle:
                while chunk := handle.read(CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise self._unreadable(split, source, error) from error

    def _text(self, split: str, source: SourceFile) -> Iterator[bytes]:
        """The same, unpacked."""
        if not compression(source.name):
            yield from self.chunks(split, source)
            return
        try:
            yield from read_text(source.path)
        except OSError as error:
            raise self._unreadable(split, source, error) from error
        except Unreadable as error:
            raise SettingsError(f"{self.label(split)}: {error}") from error

    def _documents_of(self, split: str, source: SourceFile) -> Iterator[Document]:
        """All documents of a file, the empty ones too."""
        kind = self.kind(source)
        if kind == "text":
            yield Document(split, str(source.path), self._text(split, source))
            return
        chunks = None if kind == "parquet" else self._text(split, source)
        try:
            for where, text in records(kind, source.path, chunks, self.field):
                if text is None:
                    self.nulls += 1
                else:
                    yield Document(split, where, (text,))
        except OSError as error:
            raise self._unreadable(split, source, error) from error
        except Unreadable as error:
            raise SettingsError(f"{self.label(split)}: {error}") from error

    def _whole_texts(self) -> list[tuple[str, Callable[[], Iterator[bytes]]]]:
        sources = self.sources("train")
        return [(str(source.path), lambda source=source: self._text("train", source)) for source in sources]

    def _text_size(self, index: int) -> int:
        source = self.sources("train")[index]
        if compression(source.name):
            return sum(map(len, self._text("train", source)))
        try:
            return os.stat(source.path).st_size
        except OSError as error:
            raise self._unreadable("train", source, error) from error

    def stat_parts(self) -> list[bytes]:
        parts = [self.reading.encode()]
        for split in SPLITS:
            for source in self.sources(split):
                stat = os.stat(source.path)
                parts += [split.encode(), source.name_bytes, os.fsencode(os.path.abspath(source.path))]
                parts.append(f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}".encode())
        return parts

    def content_parts(self, on_bytes: Callable[[int], None]) -> list[bytes]:
        """Names and bytes of all files."""
        parts = []
        for split in SPLITS:
            for source in self.sources(split):
                content = hashlib.sha256()
                for chunk in self.chunks(split, source):
                    content.update(chunk)
                    on_bytes(len(chunk))
                parts += [split.encode(), source.name_bytes, content.digest()]
        return parts

    def youngest(self) -> float:
        return max((os.stat(path).st_ctime for split in SPLITS for path in self.files(split)), default=0.0)

    def text_bytes(self) -> int | None:
        size = 0
        for source in self.sources("train"):
            packed = compression(source.name) or self.kind(source) == "parquet"
            size += os.stat(source.path).st_size * (COMPRESSION_RATIO if packed else 1)
        return size

    def _unreadable(self, split: str, source: SourceFile, error: OSError) -> SettingsError:
        reason = f"cannot read {source.path} ({error.strerror or error})"
        return SettingsError(f"{self.label(split)}: {reason}; give files that this user may read")


def _has_bytes(files: list[SourceFile]) -> bool:
    return any(os.stat(file.path).st_size for file in files)
