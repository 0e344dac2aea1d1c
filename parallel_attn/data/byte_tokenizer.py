"""Every byte is a token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from parallel_attn.data.byte_alphabet import BYTE_TO_CHARACTER
from parallel_attn.data.tokenizer import Piece, Tokenizer, check_ids

END_OF_TEXT = "<|endoftext|>"


class ByteTokenizer(Tokenizer):
    """Every byte is a token, and one more ends a document: V = 257.

    Bytes are kept exactly: no newline, BOM or Unicode normalisation, nothing need be valid UTF-8. So text comes back
    byte for byte, and pieces of a document can be encoded one after the other.
    """

    @dataclass
    class Config:
        pass

    name = "bytes"
    fingerprint = "bytes-257-v1"
    vocab_size = 257
    end_of_text = 256

    @classmethod
    def load(cls, config, corpus, *, builder, progress=None, wait_seconds=None) -> ByteTokenizer:
        return cls()

    @classmethod
    def from_json(cls, text: str, end_of_text: int | None = None) -> ByteTokenizer:
        return cls()

    def to_json(self) -> str:
        """A byte-level BPE without merges: other libraries read it and give the same ids."""
        end = {"id": self.end_of_text, "content": END_OF_TEXT, "special": True}
        end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        vocabulary = {character: byte for byte, character in enumerate(BYTE_TO_CHARACTER)}
        model = {"type": "BPE", "vocab": vocabulary | {END_OF_TEXT: self.end_of_text}, "merges": []}
        parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None}
        parts |= {"pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
        return json.dumps(parts, ensure_ascii=False)

    def pieces(self, chunks: Iterable[bytes]) -> Iterator[Piece]:
        return (Piece(chunk, b"") for chunk in chunks)

    def encode_piece(self, piece: Piece) -> np.ndarray:
        """Token ids [bytes of the piece] uint16."""
        return np.frombuffer(piece.text, dtype=np.uint8).astype(np.uint16)

    def encode(self, text: bytes) -> np.ndarray:
        return self.encode_piece(Piece(text, b""))

    def decode(self, ids) -> bytes:
        ids = check_ids(ids, self.vocab_size)
        return ids[ids != self.end_of_text].astype(np.uint8).tobytes()

    def token_bytes(self) -> np.ndarray:
        sizes = np.ones(self.vocab_size, dtype=np.int64)
        sizes[self.end_of_text] = 0
        return sizes
