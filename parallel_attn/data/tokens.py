"""Tokens on disk: written once as a raw little-endian stream, read through a memory map."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from parallel_attn.errors import SettingsError

BYTES_DTYPE = np.dtype("<u4")  # of the file that holds the bytes of text behind each token
COPY_BYTES = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned little-endian type for ids in [0, vocab_size): they must never wrap in silence."""
    for name in ("<u1", "<u2", "<u4"):
        if vocab_size - 1 <= np.iinfo(name).max:
            return np.dtype(name)
    raise ValueError(f"vocab_size={vocab_size}: at most {2**32}")


def sample_count(tokens: TokenFile | int, seq_len: int) -> int:
    """Samples of S = seq_len inputs and as many targets: sample i is tokens[i*S : i*S+S+1], S+1 tokens make one."""
    count = tokens if isinstance(tokens, int) else tokens.count
    return max(count - 1, 0) // seq_len


class TokenWriter:
    """Appends ids to an open file and keeps what the sidecar says about them: `count`, `sha256()`."""

    def __init__(self, handle: BinaryIO, vocab_size: int, label: str):
        """label: `key=value` of the text's setting, for messages."""
        self.handle, self.vocab_size, self.label = handle, vocab_size, label
        self.dtype = token_dtype(vocab_size)
        self.count = 0
        self._hash = hashlib.sha256()

    def write(self, ids: np.ndarray) -> None:
        """ids: [n] integers of any type. Raises SettingsError for an id outside the vocabulary."""
        if ids.size == 0:
            return
        for extreme in (int(ids.min()), int(ids.max())):
            if not 0 <= extreme < self.vocab_size:
                raise SettingsError(
                    f"{self.label}: the tokenizer gave token id {extreme}, its vocab_size is {self.vocab_size}; "
                    f"ids 0 to {self.vocab_size - 1} work"
                )
        data = ids.astype(self.dtype).tobytes()
        self.handle.write(data)
        self._hash.update(data)
        self.count += ids.size

    def append(self, other: TokenWriter) -> None:
        """Copies what another writer of the same vocabulary has written, behind what stands here."""
        other.handle.seek(0)
        while data := other.handle.read(COPY_BYTES):
            self.handle.write(data)
            self._hash.update(data)
        self.count += other.count

    def sha256(self) -> str:
        return self._hash.hexdigest()


@dataclass
class TokenFile:
    """A run of `count` tokens that begins at token `start` of the raw file `path`.

    `sha256` is that of the whole raw file: train and val lie behind one another in one file, so that a cache entry is
    one file and its sidecar. `bytes_path`: raw file with the bytes of text behind each token of this run, where they
    are kept (val). The maps are opened at the first read and do not travel in a pickle.
    """

    path: str
    dtype: str
    count: int
    sha256: str
    vocab_size: int
    start: int = 0
    end_of_text: int | None = None
    bytes_path: str | None = None
    _maps: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of this run as [stop-start] int64 (a copy). Raises IndexError outside [0, count]."""
        return self._read(self.path, np.dtype(self.dtype), start, stop, self.start)

    def read_bytes(self, start: int, stop: int) -> np.ndarray:
        """Bytes of text behind tokens start..stop-1 of this run as [stop-start] int64. Raises IndexError outside
        [0, count], ValueError where they are not kept."""
        if self.bytes_path is None:
            raise ValueError(f"the bytes behind the tokens of {self.path} are not kept")
        return self._read(self.bytes_path, BYTES_DTYPE, start, stop, 0)

    def _read(self, path: str, dtype: np.dtype, start: int, stop: int, base: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.count:
            raise IndexError(f"tokens {start}:{stop} of {self.path}, which holds {self.count}")
        if start == stop:
            return np.empty(0, dtype=np.int64)
        if path not in self._maps:
            self._maps[path] = np.memmap(path, dtype=dtype, mode="r")
        return self._maps[path][base + start : base + stop].astype(np.int64, subok=False)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_maps": {}}


@dataclass
class TokenSplits:
    """The two runs of tokens of a corpus, and the tokenizer's fingerprint."""

    train: TokenFile
    val: TokenFile
    tokenizer: str


def fingerprint(splits: TokenSplits) -> str:
    """16 hex digits that differ whenever tokens, split or vocabulary do; equal wherever the files lie."""
    parts = [splits.tokenizer]
    for tokens in (splits.train, splits.val):
        parts += [tokens.sha256, tokens.start, tokens.count, tokens.vocab_size]
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]
