"""Documents to tokens on disk: in this process or in several, with the same bytes whatever their number.

An entry is `<key>.bin` (train, then val, each document closed by end_of_text) and `<key>.bytes` (for each val token the
bytes of text that it stands for, uint32 little-endian: what bits per byte divides by, exact for any tokenizer).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from parallel_attn.data.cache import TokenCache
from parallel_attn.data.corpus import Corpus, Document
from parallel_attn.data.pool import Pool
from parallel_attn.data.tokenizer import NotUtf8, Piece, Tokenizer
from parallel_attn.data.tokens import BYTES_DTYPE, TokenWriter
from parallel_attn.errors import SettingsError

TASK_BYTES = 1 << 20  # text that is handed to a process at once

Task = list[tuple[str, Piece | None]]
"""(split, piece) in the order of the corpus; None where a document ends."""


@dataclass
class Encoded:
    """What became of a task: train ids, val ids with their bytes of text, and what else there is to know."""

    train: np.ndarray
    val: np.ndarray
    val_bytes: np.ndarray
    rest: int  # bytes of validation text behind the last val token, owed to the next one
    text_bytes: int


def encode_task(tokenizer: Tokenizer, task: Task) -> Encoded:
    """Encodes the pieces of a task; the same wherever it runs."""
    ids: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    sizes: list[np.ndarray] = []
    rest = text_bytes = 0
    end, no_bytes = np.array([tokenizer.end_of_text], dtype=np.uint32), np.zeros(1, dtype=BYTES_DTYPE)
    for split, piece in task:
        left = 0
        if piece is None:
            found, counts = end, no_bytes
        elif split == "train":
            found, counts = tokenizer.encode_piece(piece), no_bytes
        else:
            found, counts, left = tokenizer.encode_with_bytes(piece)
        ids[split].append(found)
        if split == "val":
            counts = counts.astype(BYTES_DTYPE)
            if rest and len(counts):
                counts[0] += rest
                rest = 0
            rest += left
            sizes.append(counts)
        text_bytes += _size(piece)
    return Encoded(_joined(ids["train"]), _joined(ids["val"]), _joined(sizes), rest, text_bytes)


def tasks(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[Task]:
    """The whole corpus in tasks of about TASK_BYTES. Raises SettingsError for text that cannot be read."""
    task: Task = []
    size = 0
    for document in corpus.documents():
        try:
            for piece in tokenizer.pieces(document.chunks):
                task.append((document.split, piece))
                size += _size(piece)
                if size >= TASK_BYTES or len(task) >= TASK_BYTES // 64:
                    yield task
                    task, size = [], 0
        except NotUtf8 as error:
            raise not_utf8(corpus, document, error) from error
        if document.closed:
            task.append((document.split, None))
    if task:
        yield task


def not_utf8(corpus: Corpus, document: Document, error: NotUtf8) -> SettingsError:
    """The one line for a document that a text tokenizer cannot read."""
    return SettingsError(
        f"{corpus.label(document.split)}: {document.where} is not UTF-8 at byte {document.offset + error.offset}; "
        "use tokenizer=bytes, or convert the text to UTF-8"
    )


def write_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache: TokenCache,
    key: str,
    on_bytes: Callable[[int], None],
    unchanged: Callable[[], None],
) -> dict:
    """Writes `<key>.bin` and `<key>.bytes`; returns what their sidecar says.

    on_bytes(n): after n more bytes of text. unchanged(): raises where the files are not what they were, before the
    tokens get their name. Raises SettingsError.
    """
    label = corpus.label("train")
    with cache.writing(f"{key}.bytes") as sizes, cache.writing(f"{key}.bin") as handle:
        # Documents of both splits come mixed, so val waits aside; a file without a name is gone with its process.
        with tempfile.TemporaryFile(dir=cache.folder) as aside:
            train = TokenWriter(handle, tokenizer.vocab_size, label)
            val = TokenWriter(aside, tokenizer.vocab_size, label)
            rest = 0
            for encoded in _encoded(corpus, tokenizer, on_bytes):
                train.write(encoded.train)
                val.write(encoded.val)
                if len(encoded.val_bytes):
                    encoded.val_bytes[0] += rest
                    rest = 0
                    sizes.write(encoded.val_bytes.tobytes())
                rest += encoded.rest
                on_bytes(encoded.text_bytes)
            train_count = train.count
            train.append(val)
            unchanged()
    return {
        "dtype": train.dtype.str,
        "count": train.count,
        "train_count": train_count,  # the first ones; the rest is val
        "sha256": train.sha256(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer": tokenizer.fingerprint,
        "source": label,
        "split_rule": corpus.split_rule,
        "nulls": corpus.nulls,
    }


def _encoded(corpus: Corpus, tokenizer: Tokenizer, on_bytes: Callable[[int], None]) -> Iterator[Encoded]:
    workers = corpus.config.num_workers
    if workers == 0:
        yield from (encode_task(tokenizer, task) for task in tasks(corpus, tokenizer))
        return
    with Pool(tokenizer, workers) as pool:
        yield from pool.map(tasks(corpus, tokenizer), waiting=lambda: on_bytes(0))


def _size(piece: Piece | None) -> int:
    """Bytes of a piece's text."""
    if piece is None:
        return 0
    return len(piece.text) if isinstance(piece.text, bytes) or piece.text.isascii() else len(piece.text.encode())


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)
