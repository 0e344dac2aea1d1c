"""A corpus of files named by the user: files, folders, globs; plain text or records, packed or not."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_attn.data import reading
from parallel_attn.data.files import FileCorpus, SourceFile, find_files, is_regular
from parallel_attn.data.reading import SUFFIXES
from parallel_attn.errors import SettingsError

MISSING = "???"  # OmegaConf's word for a value that the user must give
WORKS = "give a text file, a folder with text files, a glob, or a list of them"
KNOWN = f"{', '.join(reading.KINDS)} ({' '.join(reading.COMPRESSED)})"


class TextCorpus(FileCorpus):
    """`path` and `val_path` are a string or a list of strings; relative to the current folder, `~` is the home folder.

    - a file is taken whatever its name; one of a name not listed here counts as plain text;
    - a folder gives its .txt, .jsonl, .json, .csv and .parquet files, all levels deep, sorted by relative path; each
      may end in .gz or .zst too;
    - a glob (`*`, `?`, `[...]`, `**`) gives the files of these names that it matches and those in the folders it
      matches. A path that exists as it is written is never read as a glob.
    A list keeps its order; a file named twice is taken once, where it is named first.

    A plain text is one document. In the others each record is one: its text is in `field` (`a.b`: b inside a), which
    all records must have; those where it is null are left out and counted, those where it is empty are left out.
    .jsonl and .json hold one object per line; the first row of a .csv names its fields.

    Validation text: the files of `val_path` (which are then not trained on); without it one file in twenty, by the hash
    of its name, where there are at least 20 files; else every 20th document where there are records; else the last 5 %.
    """

    @dataclass
    class Config:
        path: Any = MISSING  # string or list of strings: OmegaConf has no type for that, _as_list checks it
        val_path: Any = None
        field: str = "text"
        num_workers: int = 0
        documents: bool = False
        cache_dir: str | None = None

    @property
    def field(self) -> str:
        return self.config.field

    def kind(self, source: SourceFile) -> str:
        return reading.kind(source.name)

    def check(self) -> None:
        if not self.config.field.strip():
            raise SettingsError(f"data.field={self.config.field!r}: empty; name the field that holds the text")
        super().check()

    def label(self, split: str) -> str:
        key = "val_path" if split == "val" and self.config.val_path is not None else "path"
        return f"data.{key}={_show(getattr(self.config, key))}"

    def find(self, split: str) -> list[SourceFile]:
        key = {"train": "path", "val": "val_path"}[split]
        value = getattr(self.config, key)
        if value is None and split == "val":
            return []
        found, seen = [], set()
        for entry in _as_list(f"data.{key}", value):
            for file in _expand(f"data.{key}={_show(entry)}", entry):
                place = os.path.realpath(file.path)
                if place not in seen:
                    seen.add(place)
                    found.append(file)
        return found


def _as_list(key: str, value) -> list[str]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, Sequence) or isinstance(entries, bytes) or not all(isinstance(e, str) for e in entries):
        raise SettingsError(f"{key}={_show(value)}: not a path; {WORKS}")
    if not entries or MISSING in entries or not all(entry.strip() for entry in entries):
        raise SettingsError(f"{key}={_show(value)}: no path given; {WORKS}")
    return list(entries)


def _expand(label: str, entry: str) -> list[SourceFile]:
    """The files of one entry; names are relative to the folder, or to the part of a glob before its first wildcard."""
    path = Path(os.path.expanduser(entry))
    try:
        if _exists(path):
            return _take(label, path)
        if glob.has_magic(str(path)):
            return _match(label, path)
    except PermissionError as error:
        reason = f"cannot read {error.filename} ({error.strerror})"
        raise SettingsError(f"{label}: {reason}; give files that this user may read") from error
    except (OSError, ValueError) as error:  # a name too long, a NUL byte, a loop of links, a file used as a folder
        raise SettingsError(f"{label}: {getattr(error, 'strerror', None) or error}; {WORKS}") from error
    raise SettingsError(f"{label}: no such file or folder (looked in {os.getcwd()}); {WORKS}")


def _exists(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True  # any other error says that it cannot be told: the caller's message says why


def _take(label: str, path: Path) -> list[SourceFile]:
    os.stat(path)  # a link to nothing is reported as missing
    if path.is_file():
        return [SourceFile(path.name, path)]
    if not path.is_dir():
        raise SettingsError(f"{label}: neither a file nor a folder; {WORKS}")
    files = find_files(path, SUFFIXES)
    if not files:
        raise SettingsError(f"{label}: no text file in this folder ({KNOWN}); {WORKS}")
    return files


def _match(label: str, pattern: Path) -> list[SourceFile]:
    parts = pattern.parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    if root.is_dir():
        os.listdir(root)  # glob is silent about a folder that it may not list
    files = {}
    matches = glob.glob(str(pattern), recursive=True)
    for match in map(Path, matches):
        if match.is_dir():
            inside = [file.path for file in find_files(match, SUFFIXES)]
        else:
            inside = [match] if match.name.lower().endswith(SUFFIXES) and is_regular(match) else []
        for path in inside:
            name = path.relative_to(root).as_posix()
            files[name] = SourceFile(name, path)
    if not files:
        found = f"matches {len(matches)} names, no text file among them" if matches else "matches nothing"
        raise SettingsError(f"{label}: {found} (looked in {os.getcwd()}); {WORKS}")
    return sorted(files.values(), key=lambda file: file.name_bytes)


def _show(value) -> str:
    """A value as the user wrote it, on one line and not longer than one."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        text = "[" + ",".join(_show(entry) for entry in value) + "]"
    else:
        text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 200 else text[:197] + "..."
