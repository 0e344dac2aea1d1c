"""Text in pieces of bounded size that can be encoded apart from one another.

Most documents are one piece. A longer one is cut where hardly any tokenizer lets a token cross: before a single space
between two words; else before a newline after a word; else, in a giant word, where the piece is full. Each piece knows
the text before it, so that a tokenizer that treats the start of a text in its own way does not do so at every piece.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

from parallel_attn.data.tokenizer import NotUtf8, Piece

PIECE_CHARACTERS = 1 << 16
SEARCH_CHARACTERS = 1 << 12  # how far back from a full piece a good place is looked for
CONTEXT_CHARACTERS = 256
GOOD_PLACES = (re.compile(r"(?<=\S) (?=\S)"), re.compile(r"(?<=\w)\n(?=\S)"))


def text_pieces(chunks: Iterable[bytes]) -> Iterator[Piece]:
    """Pieces of a document; where they are cut depends on the text alone, not on the chunks it arrives in.

    Raises NotUtf8 with the offset of the first byte that is no UTF-8, also across chunks and at a cut-off end.
    """
    waiting, context = "", ""
    for text in _decoded(chunks):
        waiting += text
        while len(waiting) > PIECE_CHARACTERS:
            end = _cut(waiting)
            yield Piece(waiting[:end], context)
            context, waiting = waiting[max(end - CONTEXT_CHARACTERS, 0) : end], waiting[end:]
    if waiting:
        yield Piece(waiting, context)


def _cut(text: str) -> int:
    """Where the first piece of a text longer than PIECE_CHARACTERS ends; looks at the first PIECE_CHARACTERS + 1."""
    for place in GOOD_PLACES:
        found = list(place.finditer(text, PIECE_CHARACTERS - SEARCH_CHARACTERS, PIECE_CHARACTERS + 1))
        if found:
            return found[-1].start()
    return PIECE_CHARACTERS


def _decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    seen = 0
    for chunk, final in _marked(chunks):
        begun = len(decoder.getstate()[0])  # bytes of a character that the last chunk began
        try:
            yield decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            raise NotUtf8(seen - begun + error.start) from error
        seen += len(chunk)


def _marked(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    for chunk in chunks:
        yield chunk, False
    yield b"", True
