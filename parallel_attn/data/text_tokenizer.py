"""Tokenizers that a Hugging Face tokenizer.json describes, run by the `tokenizers` library.

What pretraining needs differs from what a tokenizer.json asks for: nothing is cut off at a length or padded, no token
is put before or after a text, dropout is off, and a text that spells a special token is text.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator

import numpy as np

from parallel_attn.data.byte_alphabet import BYTE_TO_CHARACTER, bytes_of
from parallel_attn.data.pieces import PIECE_CHARACTERS, text_pieces
from parallel_attn.data.tokenizer import Piece, Tokenizer, check_ids
from parallel_attn.errors import SettingsError

ENDS_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
)
"""Names by which the token that ends a document is known, in the order in which they are looked for."""

PROBES = {
    "spaces at the start": "  two before",
    "spaces in a row": "a  b   c ",
    "line ends": "a\r\nb\rc\n\n\nd\n",
    "tabs and form feeds": "a\tb\x0cc",
    "control characters": "a\x00b\x1a",
    "capital letters": "Capital LETTERS",
    "accents": "é e\u0301 ß Ångström",
    "compatibility characters": "ﬁ ² Ａ\u00a0…",
    "other scripts": "日本語 русский हिन्दी",
    "emoji": "😀👩\u200d💻",
    "byte order marks": "\ufeffa",
    "punctuation": "don't , do this ! (x) [1] `a_b`",
}
"""Texts that tokenizers are known to change."""


class TextTokenizer(Tokenizer):
    """A tokenizer of UTF-8 text. Documents longer than a piece (pieces.py) are encoded in pieces.

    A byte-level tokenizer that changes nothing before it encodes keeps text byte for byte; any other may change it, and
    `notes` says in what.
    """

    name = "text"

    def __init__(self, text: str, *, label: str, end_of_text: str | int | None = None):
        """text: of a tokenizer.json. label: `key=value` of the setting, for messages. end_of_text: a token or an id;
        None: the first of ENDS_OF_TEXT that the vocabulary has. Raises SettingsError where it cannot serve."""
        self._text, self._label = text, label
        spec = _read(text, label)
        self._library = _library(spec, label)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._end_name, self.end_of_text = _end_of_text(vocabulary, end_of_text, label)
        _mark_special(spec, self._end_name, self.end_of_text)
        self._library = _library(spec, label)
        self._library.encode_special_tokens = True  # the library's word for: a special token in a text is text
        self._changes = spec["normalizer"]
        self._unknown = vocabulary.get(spec["model"].get("unk_token"), spec["model"].get("unk_id"))
        used = json.dumps(spec, sort_keys=True) + f" end of text {self.end_of_text}, pieces of {PIECE_CHARACTERS}"
        self.fingerprint = f"{self.name}-{hashlib.sha256(used.encode()).hexdigest()[:32]}"
        self._token_bytes = _byte_level(spec, vocabulary, self.vocab_size)
        if self._token_bytes is not None and any(map(self._changed, PROBES.values())):
            self._token_bytes = None
        self._sizes = self._token_bytes and np.array([len(token) for token in self._token_bytes], dtype=np.int64)

    @classmethod
    def from_json(cls, text: str, end_of_text: int | None = None) -> TextTokenizer:
        return cls(text, label="tokenizer.json", end_of_text=end_of_text)

    def to_json(self) -> str:
        return self._text

    def pieces(self, chunks: Iterable[bytes]) -> Iterator[Piece]:
        return text_pieces(chunks)

    def encode_piece(self, piece: Piece) -> np.ndarray:
        if not piece.context:
            return np.array(self._run(piece.text, offsets=False).ids, dtype=np.uint32)
        return self._in_context(piece)[0]

    def encode_with_bytes(self, piece: Piece) -> tuple[np.ndarray, np.ndarray, int]:
        ids, ends = self._in_context(piece)
        positions = _byte_positions(piece.text)
        total = int(positions[-1])
        if not len(ids):
            return ids, np.empty(0, dtype=np.int64), total
        if self._sizes is not None:
            counts = self._sizes[ids]
            if counts.sum() == total:
                return ids, counts, 0
        # A token stands for the text from the end of the one before it to its own: also for what a normaliser drops.
        ends = np.maximum.accumulate(np.clip(ends, 0, len(piece.text)))
        ends[-1] = len(piece.text)
        return ids, np.diff(positions[ends], prepend=0), 0

    def _in_context(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """(ids [n], the character of the piece before which each ends [n])."""
        if piece.context:
            cut = len(piece.context)
            found = self._run(piece.context + piece.text)
            offsets = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
            inside = int(np.searchsorted(np.maximum.accumulate(offsets[:, 0]), cut))
            if inside < len(offsets) and (offsets[:inside, 1] <= cut).all():
                return np.array(found.ids[inside:], dtype=np.uint32), offsets[inside:, 1] - cut
            # A token crosses the cut: then the piece is encoded as a text of its own, so that no character is lost.
        found = self._run(piece.text)
        return np.array(found.ids, dtype=np.uint32), np.array([end for _, end in found.offsets], dtype=np.int64)

    def _run(self, text: str, offsets: bool = True):
        try:
            if offsets:
                return self._library.encode(text, add_special_tokens=False)
            return self._library.encode_batch_fast([text], add_special_tokens=False)[0]  # a quarter less time
        except Exception as error:
            if type(error) is not Exception:  # the library raises the bare class for what a model cannot encode
                raise
            shown = ascii(text[:40])
            raise SettingsError(
                f"{self._label}: cannot encode a text that begins {shown} ({_line(error)}); use a tokenizer that "
                "takes any text, such as tokenizer=bpe"
            ) from error

    def decode(self, ids) -> bytes:
        ids = check_ids(ids, self.vocab_size)
        if self._token_bytes is not None:
            return b"".join(self._token_bytes[token] for token in ids)
        kept = ids[ids != self.end_of_text].tolist()
        return self._library.decode(kept, skip_special_tokens=True).encode()

    def lacks(self, text: str) -> str | None:
        if self._there_and_back(text) == text.encode():
            return None
        found = self._run(text)
        for token, (start, stop) in zip(found.ids, found.offsets):
            if token == self._unknown:
                word = text[start:stop]
                return next((character for character in word if self._unknown in self._ids(character)), word.strip() or word)
        for character in dict.fromkeys(text):
            if character.isspace() or unicodedata.category(character)[0] in "MC":
                continue  # what tokenizers drop or fold on purpose
            ids = self._ids(character)
            if self._unknown not in ids and not self.decode(ids).strip():
                return character
        return None

    def token_bytes(self) -> np.ndarray | None:
        return None if self._sizes is None else self._sizes.copy()

    def notes(self) -> list[str]:
        notes = []
        back = {name: self._there_and_back(text) for name, text in PROBES.items()}
        changed = [name for name, text in PROBES.items() if back[name] != text.encode()]
        if changed and all(back[name] in (text.encode(), f" {text}".encode()) for name, text in PROBES.items()):
            notes.append(f"{self._label}: a text that begins without a space comes back with one")
        elif changed:
            cause = f" (normalizer {_types(self._changes)})" if self._changes else ""
            notes.append(f"{self._label}: text does not come back byte for byte: {', '.join(changed)}{cause}")
        if self.end_of_text in self._ids(f"a {self._end_name} b"):
            notes.append(f"{self._label}: a text that spells {self._end_name} is taken for the end of a document")
        return notes

    def _changed(self, text: str) -> bool:
        return self._there_and_back(text) != text.encode()

    def _there_and_back(self, text: str) -> bytes:
        return self.decode(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        """Ids of a probe; none where it cannot even be encoded."""
        try:
            return self._run(text).ids
        except SettingsError:
            return []


def _read(text: str, label: str) -> dict:
    """The parts of a tokenizer.json, made fit for pretraining."""
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{label}: no JSON ({_line(error)}); give the tokenizer.json of a tokenizer") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise SettingsError(
            f"{label}: JSON without a model, so no tokenizer.json; give the tokenizer.json of a tokenizer"
        )
    spec |= dict.fromkeys(("truncation", "padding", "post_processor"))
    spec.setdefault("normalizer", None)
    if spec["model"].get("dropout"):
        spec["model"]["dropout"] = None
    return spec


def _library(spec: dict, label: str):
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:
        if type(error) is not Exception:  # the library raises the bare class for what it cannot read
            raise
        raise SettingsError(
            f"{label}: not a tokenizer that tokenizers {tokenizers.__version__} reads ({_line(error)}); "
            "give the tokenizer.json of a tokenizer"
        ) from error


def _end_of_text(vocabulary: dict[str, int], wanted: str | int | None, label: str) -> tuple[str, int]:
    names = ENDS_OF_TEXT
    if isinstance(wanted, int):
        names = [name for name, token in vocabulary.items() if token == wanted]
    elif wanted is not None:
        names = [wanted]
    for name in names:
        if name in vocabulary:
            return name, vocabulary[name]
    marks = sorted(
        name for name in vocabulary if len(name) > 2 and name[0] in "<[" and name[-1] in ">]" and name[1] != "0"
    )
    like = f"such as one of {', '.join(marks[:12])}" if marks else "the token that ends a document"
    if wanted is None:
        raise SettingsError(
            f"{label}: has none of {', '.join(ENDS_OF_TEXT)}; set tokenizer.end_of_text to a token, {like}"
        )
    raise SettingsError(f"tokenizer.end_of_text={wanted}: not in the vocabulary of {label}; set a token, {like}")


def _mark_special(spec: dict, name: str, token: int) -> None:
    """Makes the end of text a special token, which no text is taken for."""
    added = spec["added_tokens"] = spec.get("added_tokens") or []
    entry = next((entry for entry in added if entry["content"] == name), None)
    if entry is None:
        entry = {"id": token, "content": name} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append(entry)
    entry["special"] = True


def _byte_level(spec: dict, vocabulary: dict[str, int], vocab_size: int) -> list[bytes] | None:
    """The bytes of each token where the tokenizer is byte-level and changes nothing before that; else None."""
    added = {entry["content"]: entry for entry in spec["added_tokens"]}
    level = [step for step in _steps(spec.get("pre_tokenizer")) if step["type"] == "ByteLevel"]
    if (
        spec["normalizer"] is not None
        or spec["model"].get("type") != "BPE"
        or not level
        or any(step.get("add_prefix_space") for step in level)
        or any(entry["lstrip"] or entry["rstrip"] for entry in added.values() if not entry["special"])
        or not set(BYTE_TO_CHARACTER) <= set(vocabulary)
    ):
        return None
    tokens = [b""] * vocab_size
    for name, token in vocabulary.items():
        if name in added:
            found = b"" if added[name]["special"] else name.encode()
        else:
            found = bytes_of(name)
        if found is None:
            return None
        tokens[token] = found
    return tokens


def _steps(part: dict | None) -> list[dict]:
    """The steps of a pre-tokenizer or normaliser, those inside a Sequence one by one."""
    if part is None:
        return []
    inner = part.get("pretokenizers") or part.get("normalizers")
    return [step for child in inner for step in _steps(child)] if inner else [part]


def _types(part: dict) -> str:
    return ", ".join(step.get("type", "?") for step in _steps(part))


def _byte_positions(text: str) -> np.ndarray:
    """Where each character of a text begins in its UTF-8, and where it ends: [len(text) + 1] int64."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([[0], np.cumsum(sizes)])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
