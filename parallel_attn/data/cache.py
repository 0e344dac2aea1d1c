"""The token cache on disk. An entry is `<key>.bin` (raw tokens), `<key>.bytes` (bytes of text behind each val token)
and `<key>.json` (what they are).

The JSON is written last: where it stands, and the sizes agree, the entry is whole. Every file is written
under a name of its own process, synced and renamed: builders at the same time and processes killed halfway do no harm.
`stat-<stat key>.json` says which content the files on disk had, so that it need not be hashed again.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from parallel_attn.data.identity import FORMAT
from parallel_attn.data.tokens import BYTES_DTYPE, TokenFile, TokenSplits
from parallel_attn.errors import SettingsError

STALE_SECONDS = 24 * 3600  # a temporary file untouched for a day belongs to nobody


class TokenCache:
    """One cache folder. `setting` is data.cache_dir; null: $XDG_CACHE_HOME (else ~/.cache) + parallel_attn/tokens."""

    def __init__(self, setting: str | None):
        self.setting = setting
        self.folder = _folder(setting)

    def error(self, reason: str) -> SettingsError:
        shown = "null" if self.setting is None else self.setting
        where = "" if self.setting == str(self.folder) else f" ({self.folder})"
        return SettingsError(f"data.cache_dir={shown}: {reason}{where}; give a folder this user may write, with room")

    def require_writable(self) -> None:
        """Raises SettingsError where the folder cannot be made or written, on every rank that would need it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self._temporary(self.folder / "probe")
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise self.error(f"cannot write there, {error.strerror}") from error

    def remove_stale(self) -> None:
        """Drop what killed processes left behind. Temporary files in use are touched all the time, so they stay."""
        for path in self.folder.glob("*.tmp"):
            try:
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
            except OSError:
                continue  # somebody else was faster, or owns it: either way it does not hurt

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """A file that appears under `name` when the block ends well, whole and synced, and not at all otherwise.

        Raises SettingsError where the disk refuses (full, quota). The block must turn other OSErrors into its own.
        """
        final = self.folder / name
        temporary = self._temporary(final)
        try:
            with open(temporary, "xb", buffering=1 << 20) as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, final)
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)  # the new name itself
            finally:
                os.close(folder)
        except OSError as error:
            raise self.error(f"cannot write {name} there, {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def write_json(self, name: str, value: dict) -> None:
        with self.writing(name) as handle:
            handle.write(json.dumps({"format": FORMAT} | value, indent=1).encode())

    def read_json(self, name: str) -> dict | None:
        """The object in the file, or None where it is missing, no JSON, or of another format version."""
        try:
            value = json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) and value.get("format") == FORMAT else None

    def note_of(self, stat: str) -> dict | None:
        """What is known of a corpus by its stat key: its `content` key and what it is `pinned` to."""
        note = self.read_json(f"stat-{stat}.json")
        return note if note and note.get("content") else None

    def remember_note(self, stat: str, note: dict) -> None:
        self.write_json(f"stat-{stat}.json", note)

    def load(self, key: str) -> TokenSplits | None:
        """The tokens of an entry, or None where it is not whole (then its builder writes it again)."""
        entry = self.read_json(f"{key}.json")
        path = self.folder / f"{key}.bin"
        try:
            size = path.stat().st_size
            # KeyError, TypeError: a sidecar that somebody edited is as good as none
            if entry is None or size != entry["count"] * np.dtype(entry["dtype"]).itemsize:
                return None
            cut, sizes = entry["train_count"], self.folder / f"{key}.bytes"
            val_count = entry["count"] - cut
            if sizes.stat().st_size != val_count * BYTES_DTYPE.itemsize:
                return None
            common = {name: entry[name] for name in ("dtype", "sha256", "vocab_size", "end_of_text")}
            common["path"] = str(path)
            return TokenSplits(
                train=TokenFile(count=cut, **common),
                val=TokenFile(count=val_count, start=cut, bytes_path=str(sizes), **common),
                tokenizer=entry["tokenizer"],
            )
        except (OSError, KeyError, TypeError):
            return None

    def sign_of_life(self, claim: str) -> None:
        """Tell those who wait that somebody is building. The file stays: only a change of its time says anything."""
        try:
            (self.folder / f"claim-{claim}").touch()
        except OSError:
            pass  # another user's file in a shared cache: then others may build too, which is harmless

    def last_sign(self, claim: str) -> int | None:
        """Time stamp of the last sign, to be compared with an earlier one, never with this machine's clock."""
        try:
            return (self.folder / f"claim-{claim}").stat().st_mtime_ns
        except OSError:
            return None

    def leave_failure(self, claim: str, message: str) -> None:
        """Tell those who wait why nothing will come."""
        try:
            self.write_json(f"claim-{claim}.json", {"error": message, "id": uuid.uuid4().hex})
        except SettingsError:
            pass  # where nothing can be written nobody waits for long; the failure itself is raised by the caller

    def failure(self, claim: str) -> dict | None:
        """The last failure of a builder, with an `id` that tells it from an earlier one."""
        return self.read_json(f"claim-{claim}.json")

    @staticmethod
    def _temporary(final: Path) -> Path:
        return final.with_name(f"{final.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def _folder(setting: str | None) -> Path:
    if setting is not None:
        if not setting.strip() or "\0" in setting:
            raise SettingsError(f"data.cache_dir={setting!r}: not a folder; give a path, or null for the user's cache")
        return Path(os.path.abspath(os.path.expanduser(setting)))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG standard: relative values are to be ignored
        base = os.path.expanduser("~/.cache")
    return Path(os.path.abspath(base)) / "parallel_attn" / "tokens"
