"""What any tokenizer has. Text goes in as pieces of documents, so that one giant document needs no more memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallel_attn.data.corpus import Corpus

Progress = Callable[[str], None]


class Piece(NamedTuple):
    """A part of a document. `context`: the text right before it (as much as matters), which gives no tokens."""

    text: str | bytes
    context: str | bytes


class NotUtf8(ValueError):
    """Bytes that are no UTF-8, at byte `offset` of the document's chunks."""

    def __init__(self, offset: int):
        super().__init__(f"not UTF-8 at byte {offset}")
        self.offset = offset


class Tokenizer(ABC):
    """Base of all tokenizers. A subclass has its own `Config` dataclass (the schema of its YAML).

    Attributes: `name`; `fingerprint`, which changes whenever the ids of some text could; `vocab_size`, one more than
    the largest id; `end_of_text`, the id that closes a document and stands for no bytes.
    Text is text: a document that spells a special token gives ordinary tokens (else `notes` says so).
    """

    name: str
    fingerprint: str
    vocab_size: int
    end_of_text: int

    @classmethod
    @abstractmethod
    def load(
        cls,
        config,
        corpus: Corpus,
        *,
        builder: bool,
        progress: Progress | None = None,
        wait_seconds: float | None = None,
    ) -> Tokenizer:
        """The tokenizer of a Config, on every rank, without a collective. Arguments as in prepare_tokens.

        corpus: whose training text a tokenizer is trained on, where it is trained at all. Raises SettingsError.
        """

    @classmethod
    @abstractmethod
    def from_json(cls, text: str, end_of_text: int | None = None) -> Tokenizer:
        """The tokenizer that `to_json` came from. end_of_text: its id, where its name is not a common one."""

    @abstractmethod
    def to_json(self) -> str:
        """The whole tokenizer as the text of a Hugging Face tokenizer.json."""

    @abstractmethod
    def pieces(self, chunks: Iterable[bytes]) -> Iterator[Piece]:
        """A document in pieces, cut where no token should cross; lazily. Raises NotUtf8 where that matters."""

    @abstractmethod
    def encode_piece(self, piece: Piece) -> np.ndarray:
        """Token ids of a piece [n] integers, without end_of_text."""

    @abstractmethod
    def decode(self, ids) -> bytes:
        """The text that the ids stand for; end_of_text stands for none. Raises ValueError for an id outside [0, V)."""

    def encode_with_bytes(self, piece: Piece) -> tuple[np.ndarray, np.ndarray, int]:
        """(ids [n], bytes of text that each stands for [n] int64, bytes that no token of the piece stands for).

        Counts and rest add up to the bytes of the piece exactly, whatever a tokenizer makes of its text.
        """
        ids = self.encode_piece(piece)
        return ids, self.token_bytes()[ids], 0

    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text behind each token, [V] int64; special tokens 0. None where the id alone does not say."""
        return None

    def notes(self) -> list[str]:
        """Lines for the user: where text does not come back byte for byte, and what else is odd."""
        return []

    def lacks(self, text: str) -> str | None:
        """A character of a text that no token stands for, or a word where words are looked up whole; None: there is none."""
        return None

    # What follows from it

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of a whole text, without end_of_text."""
        return _joined(self.encode_document([text]))

    def encode_document(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Token ids of a document that arrives in chunks of any size, without end_of_text; memory of a piece."""
        return map(self.encode_piece, self.pieces(chunks))

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes `tokenizer.json` into a folder that exists; returns its path."""
        path = Path(folder, "tokenizer.json")
        path.write_text(self.to_json(), encoding="utf-8")
        return path


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    parts = list(parts)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)


def check_ids(ids, vocab_size: int) -> np.ndarray:
    """ids as [n] int64. Raises ValueError for one outside [0, vocab_size)."""
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"token id {wrong[0]} is not in the vocabulary of {vocab_size}")
    return ids
