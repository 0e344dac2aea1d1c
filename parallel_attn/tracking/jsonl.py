"""`metrics.jsonl` and `summary.json`: what was logged is on disk, whole."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel_attn.tracking.plain import plain_json, plain_number


class JsonlWriter:
    """Appends one JSON object per record to a file; each record has `step` and the given numbers.

    A line is handed to the kernel in one write, so a killed process leaves only whole lines. A record that fits only in
    part (disk full) is taken back. NaN and infinities are written as null. A file that is already there is appended to:
    a resumed run may repeat steps, then the later line counts. A half line at its end (a crash of the machine) is cut.

    Raises OSError, naming the path, when a record cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._file: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._mend_last_line()
        except OSError as error:
            raise _named(error, self.path) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes `{"step": step, **values}` as one line and returns when the kernel has it."""
        if self._file is None:
            raise ValueError(f"{self.path} is closed: no record can follow")
        record = {"step": int(step), **{key: plain_number(value) for key, value in values.items()}}
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            self._append(line)
        except OSError as error:
            raise _named(error, self.path) from error

    def close(self) -> None:
        """Makes the lines outlive a power cut, then closes; a second call does nothing."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            if os.path.isfile(self.path):  # a device or a pipe knows no fsync
                os.fsync(file)
        except OSError as error:
            raise _named(error, self.path) from error
        finally:
            os.close(file)

    def _append(self, line: bytes) -> None:
        written = os.write(self._file, line)
        if written == len(line):
            return
        start = os.fstat(self._file).st_size - written
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, start)
            raise

    def _mend_last_line(self) -> None:
        if not os.path.isfile(self.path) or (size := os.fstat(self._file).st_size) == 0:
            return
        with open(self.path, "rb") as reader:
            reader.seek(max(0, size - (1 << 20)))
            tail = reader.read().rpartition(b"\n")[2]
        if not tail:
            return
        try:
            json.loads(tail)
            os.write(self._file, b"\n")  # a whole record that lacks only its newline (edited by hand)
        except ValueError:
            os.ftruncate(self._file, size - len(tail))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All records of a `metrics.jsonl`, in file order; an empty list if there is no file."""
    if not Path(path).is_file():
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary` as JSON, whole or not at all: temporary file, fsync, rename. Raises OSError naming the path."""
    path = Path(path)
    text = json.dumps(plain_json(summary), indent=2, allow_nan=False) + "\n"
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would hide a shared run from colleagues
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> OSError:
    reason = error.strerror or str(error)
    return OSError(error.errno, f"{path} cannot be written ({reason}): free space or choose another run_dir")
