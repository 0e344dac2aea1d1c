"""A corpus from the Hugging Face hub, or from local files in the layout of one, streamed by `datasets`."""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from parallel_attn.data.corpus import (
    CHUNK_BYTES,
    SPLIT_BY_DOCUMENT,
    SPLIT_GIVEN,
    Corpus,
    Document,
    hold_out_documents,
    with_text,
)
from parallel_attn.data.reading import kind
from parallel_attn.data.records import encoded, missing_field, pick
from parallel_attn.errors import SettingsError

MISSING = "???"  # OmegaConf's word for a value that the user must give
READERS = {"json": "json", "csv": "csv", "parquet": "parquet", "text": "text"}
"""What `datasets` calls the reader of a file, by what the file holds."""
WORKS = "give a dataset of the hub (owner/name), a folder, a file or a glob"


class HubCorpus(Corpus):
    """A dataset by name, subset, split and field. A record is a document; those whose field is null are left out.

    Validation text: `val_split` where it is given, else every 20th document. `max_documents` stops each split early.
    Nothing of the dataset is run (no `trust_remote_code`), and it is streamed: only the tokens come to rest on disk.
    The tokens are cached under the settings and the commit that was current when they were first made, so they are
    found again without the network; `revision` asks for another. Local files count by place, size and time, as
    elsewhere.
    """

    @dataclass
    class Config:
        name: str = MISSING
        subset: str | None = None
        split: str = "train"
        val_split: str | None = None
        field: str = "text"
        revision: str | None = None
        max_documents: int | None = None
        num_workers: int = 0
        documents: bool = False
        cache_dir: str | None = None

    own_split = "data.val_split"

    def label(self, split: str) -> str:
        own = split == "val" and self.config.val_split is not None
        part = f"data.val_split={self.config.val_split}" if own else f"data.split={self.config.split}"
        subset = "" if self.config.subset is None else f" data.subset={self.config.subset}"
        return f"data.name={self.config.name}{subset} {part}"

    @property
    def split_rule(self) -> str:
        return SPLIT_BY_DOCUMENT if self.config.val_split is None else SPLIT_GIVEN

    def check(self) -> None:
        """Settings only: whether the hub has the dataset shows when its tokens have to be made."""
        super().check()
        config = self.config
        if not config.name.strip() or config.name == MISSING:
            raise SettingsError(f"data.name={config.name}: no dataset; {WORKS}")
        for key in ("split", "val_split", "field"):
            value = getattr(config, key)
            if value is not None and not value.strip():
                raise SettingsError(f"data.{key}={value!r}: empty; give a name")
        if config.val_split == config.split:
            raise SettingsError(f"data.val_split={config.val_split}: is also data.split; give another, or null")
        if config.max_documents is not None and config.max_documents < 1:
            raise SettingsError(f"data.max_documents={config.max_documents}: must be at least 1; null takes all")

    @cached_property
    def _local(self) -> list[Path]:
        """The files that the name stands for here; none: it is a name of the hub."""
        path = Path(os.path.expanduser(self.config.name))
        if path.is_dir():
            return sorted(file for file in path.rglob("*") if file.is_file())
        if path.is_file():
            return [path]
        return sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())

    def _settings(self) -> list[str]:
        config = self.config
        names = ("name", "subset", "split", "val_split", "field", "revision", "max_documents")
        return [f"{name}={getattr(config, name)!r}" for name in names]

    def stat_parts(self) -> list[bytes]:
        parts = [setting.encode() for setting in self._settings()]
        for path in self._local:
            stat = os.stat(path)
            parts += [
                os.fsencode(os.path.abspath(path)),
                f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}".encode(),
            ]
        return parts

    def content_parts(self, on_bytes: Callable[[int], None]) -> list[bytes]:
        parts = [setting.encode() for setting in self._settings()[1:]]
        if not self._local:
            self.pinned = self._commit()
            return [self.config.name.encode(), str(self.pinned).encode(), *parts]
        for path in self._local:
            content = hashlib.sha256()
            with open(path, "rb") as handle:
                while chunk := handle.read(CHUNK_BYTES):
                    content.update(chunk)
                    on_bytes(len(chunk))
            parts += [os.fsencode(path.name), content.digest()]
        return parts

    def youngest(self) -> float:
        return max((os.stat(path).st_ctime for path in self._local), default=0.0)

    def documents(self) -> Iterator[Document]:
        self.nulls = 0
        train = self._records("train", self.config.split)
        if self.config.val_split is None:
            yield from hold_out_documents(train)
            return
        yield from train
        yield from self._records("val", self.config.val_split)

    def _records(self, part: str, split: str) -> Iterator[Document]:
        field, taken = self.config.field, 0
        for number, record in enumerate(self._stream(split), start=1):
            where = f"record {number} of {self.config.name} {split}"
            text = encoded(pick(record, field, where), field, where)
            if text is None:
                self.nulls += 1
                continue
            document = with_text(Document(part, where, (text,)))
            if document is not None:
                yield document
                taken += 1
                if taken == self.config.max_documents:
                    return

    def _stream(self, split: str) -> Iterator[dict]:
        import datasets

        config = self.config
        source: dict = {"path": config.name, "revision": self.pinned or config.revision}
        if self._local:
            source = {"path": os.path.expanduser(config.name)}
            if not Path(source["path"]).is_dir():
                files = [str(path.absolute()) for path in self._local]
                source = {"path": READERS[kind(files[0])], "data_files": {"train": files}}
        try:
            stream = datasets.load_dataset(**source, name=config.subset, split=split, streaming=True)
            names = stream.column_names
            if names and config.field not in names and config.field.split(".")[0] not in names:
                raise missing_field(config.field, f"{config.name} {split}", list(names))
            yield from stream
        except SettingsError:
            raise
        except _failures() as error:
            raise self._failed(split, error) from error

    def _commit(self) -> str | None:
        """The commit that the hub has now. Asked for first: that fails at once where `datasets` would try for long."""
        import huggingface_hub

        try:
            return huggingface_hub.HfApi().dataset_info(self.config.name, revision=self.config.revision, timeout=30).sha
        except _failures() as error:
            raise self._failed(self.config.split, error) from error

    def _failed(self, split: str, error: Exception) -> SettingsError:
        """One line for whatever `datasets` and the hub say; a dataset, its subset and its splits by the keys' names."""
        from huggingface_hub import errors

        reason = " ".join(str(error).split())[:300]
        part = "val" if split == self.config.val_split else "train"
        name = f"data.name={self.config.name}"
        if isinstance(error, errors.GatedRepoError):
            return SettingsError(
                f"{name}: the hub gives it only to who has accepted its terms; do so, then set HF_TOKEN"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return SettingsError(
                f"data.revision={self.config.revision}: not in {name}; give a branch, tag or commit of it"
            )
        if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            return SettingsError(f"{name}: neither here nor on the hub (a private one needs HF_TOKEN); {WORKS}")
        if "Bad split" in reason or "Unknown split" in reason:
            key = "val_split" if part == "val" else "split"
            return SettingsError(f"data.{key}={split}: {reason}; give one of those")
        if "BuilderConfig" in reason or "Config name is missing" in reason:
            return SettingsError(f"data.subset={self.config.subset}: {reason}; give one of those")
        if self._local or isinstance(error, (ValueError, RuntimeError)):
            return SettingsError(f"{self.label(part)}: cannot be read ({reason}); give data that `datasets` reads")
        return SettingsError(
            f"{name}: the hub cannot be reached ({type(error).__name__}: {reason}); "
            "offline use data=text, data=stdlib or tokens made before"
        )


def _failures() -> tuple[type[Exception], ...]:
    """What `datasets`, the hub's client and the readers below them raise for input that cannot be had or read."""
    import datasets.exceptions

    # the hub's client brings its own HTTP library, under one name or another; its errors are no OSErrors
    http = [sys.modules[name].HTTPError for name in ("httpx", "httpx2") if name in sys.modules]
    known = (OSError, EOFError, ValueError, RuntimeError, zlib.error, datasets.exceptions.DatasetsError)
    zst = [sys.modules["zstandard"].ZstdError] if "zstandard" in sys.modules else []
    return (*known, *http, *zst)
