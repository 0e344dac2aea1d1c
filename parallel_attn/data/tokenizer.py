"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


class ByteTokenizer:
    """Every byte is a token, and one more ends a document: V = 257.

    Bytes are kept exactly: no newline, BOM or Unicode normalisation, nothing need be valid UTF-8. So text comes back
    byte for byte, and pieces of a document can be encoded one after the other.

    What any tokenizer has: `name`, `fingerprint` (changes whenever the ids of some text could), `vocab_size`,
    `end_of_text`, `encode_document`, `decode`, `token_bytes`.
    """

    name = "bytes"
    fingerprint = "bytes-257-v1"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids [len(text)] uint16, without end_of_text."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def encode_document(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Token ids of a document that arrives in pieces, without end_of_text; memory of one piece."""
        for chunk in chunks:
            yield self.encode(chunk)

    def decode(self, ids) -> bytes:
        """The bytes that the ids stand for; end_of_text stands for none. Raises ValueError for an id outside [0, V)."""
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.size:
            raise ValueError(f"token id {wrong[0]} is not in the vocabulary of {self.vocab_size}")
        return ids[ids != self.end_of_text].astype(np.uint8).tobytes()

    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each token stands for, [V] int64; special tokens 0. Bits per byte divides by their sum."""
        sizes = np.ones(self.vocab_size, dtype=np.int64)
        sizes[self.end_of_text] = 0
        return sizes
