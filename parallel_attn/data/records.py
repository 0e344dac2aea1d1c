"""Records of a file (JSON lines, CSV, Parquet) one by one, and the text in one field of each.

Memory: one line (JSON), one record (CSV), or 256 rows (Parquet) at a time, whatever the size of the file.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from parallel_attn.data.reading import Unreadable, compression, read_text
from parallel_attn.errors import SettingsError

ROWS = 256
MANY_FIELDS = 30
BOM = b"\xef\xbb\xbf"


def records(kind: str, path: Path, chunks: Iterable[bytes] | None, field: str) -> Iterator[tuple[str, bytes | None]]:
    """(place, text as UTF-8) of each record; None where the field is null. kind: json, csv or parquet.

    chunks: the unpacked bytes of the file, not used for Parquet. field: a name, or a.b for a field inside a field.
    Raises SettingsError for a field that is not there or holds no text, Unreadable for a broken file.
    """
    if kind == "parquet":
        rows = _parquet_rows(path, field)
    else:
        rows = {"json": _json_rows, "csv": _csv_rows}[kind](path, chunks)
    for where, record in rows:
        yield where, encoded(pick(record, field, where), field, where)


def pick(record: dict, field: str, where: str):
    """The value of a field; `a.b` is the field b of a, where there is no field `a.b`. Raises SettingsError."""
    value = record
    for name in [field] if field in record else field.split("."):
        if value is None:
            return None  # a null that holds the field: as null as the field itself
        if not isinstance(value, dict) or name not in value:
            raise missing_field(field, where, list(record))
        value = value[name]
    return value


def missing_field(field: str, where: str, names: list[str]) -> SettingsError:
    more = f" and {len(names) - MANY_FIELDS} more" if len(names) > MANY_FIELDS else ""
    listed = ", ".join(map(str, names[:MANY_FIELDS])) + more
    return SettingsError(f"data.field={field}: not in {where}; fields there: {listed or 'none'}")


def encoded(value, field: str, where: str) -> bytes | None:
    """A field's value as UTF-8; None stays None. Raises SettingsError for what is no text."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise SettingsError(
            f"data.field={field}: {type(value).__name__} instead of text in {where}; name a field that holds text"
        )
    try:
        return value.encode("utf-8", "surrogateescape")  # CSV hands on bytes that are not UTF-8 in this way
    except UnicodeEncodeError as error:
        raise SettingsError(
            f"data.field={field}: half a surrogate pair (\\u{ord(value[error.start]):04x}) at character {error.start} "
            f"in {where}, which no text can hold; leave the record out"
        ) from error


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines with their newline (\\n alone ends one); memory of one line, time linear in its length."""
    parts: list[bytes] = []
    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start) + 1) > 0:
            parts.append(chunk[start:end])
            yield b"".join(parts)
            parts, start = [], end
        if start < len(chunk):
            parts.append(chunk[start:])
    if parts:
        yield b"".join(parts)


def _json_rows(path: Path, chunks: Iterable[bytes]) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(lines(chunks), start=1):
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise Unreadable(f"{where}: not UTF-8 at byte {error.start} of the line; JSON must be UTF-8") from error
        except (ValueError, RecursionError) as error:
            known = isinstance(error, json.JSONDecodeError)  # others: a number too long, brackets too deep
            reason = f"{error.msg} at character {error.pos}" if known else str(error)
            raise Unreadable(f"{where}: no JSON ({reason}); each line must be one JSON object") from error
        if not isinstance(record, dict):
            raise Unreadable(f"{where}: a JSON {type(record).__name__}; each line must be one JSON object with fields")
        yield where, record


def _csv_rows(path: Path, chunks: Iterable[bytes]) -> Iterator[tuple[str, dict]]:
    """The first row names the fields. Quotes and newlines inside quotes as in RFC 4180, bytes kept as they are."""
    csv.field_size_limit(2**31 - 1)  # the module's own limit of 128 KiB is shorter than many a document
    texts = (line.decode("utf-8", "surrogateescape") for line in _without_bom(lines(chunks)))
    reader = csv.reader(texts, strict=True)
    names: list[str] | None = None
    before = 0
    try:
        for row in reader:
            where, before = f"{path} line {before + 1}", reader.line_num
            if not row:
                continue
            if names is None:
                names = row
            elif len(row) != len(names):
                raise Unreadable(f"{where}: {len(row)} values, the first row names {len(names)} fields; make them even")
            else:
                yield where, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise Unreadable(f"{path} line {before + 1}: no CSV ({error}); quote values by RFC 4180") from error


def _without_bom(found: Iterable[bytes]) -> Iterator[bytes]:
    for index, line in enumerate(found):
        yield line.removeprefix(BOM) if index == 0 else line


def _parquet_rows(path: Path, field: str) -> Iterator[tuple[str, dict]]:
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryFile() as unpacked:
        if compression(path.name):  # read from its end: it has to lie somewhere whole
            unpacked.writelines(read_text(path))
        try:
            source = unpacked if compression(path.name) else path
            with pyarrow.parquet.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20) as file:
                names = file.schema_arrow.names
                if field not in names and field.split(".")[0] not in names:
                    raise missing_field(field, str(path), names)
                row = 0
                for batch in file.iter_batches(ROWS, columns=[field], use_threads=False):
                    if batch.num_columns == 0:  # a.b without b
                        raise missing_field(field, str(path), names)
                    for record in batch.to_pylist():
                        row += 1
                        yield f"{path} row {row}", record
        except (pyarrow.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise Unreadable(f"{path}: no Parquet ({reason[:200]}); copy it again or leave it out") from error
