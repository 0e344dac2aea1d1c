"""The last 5 % of a few plain texts as validation text, cut at a byte and never inside a character."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parallel_attn.data.corpus import HOLDOUT, Document, with_text

Read = Callable[[], Iterator[bytes]]


def cut_tail(texts: list[tuple[str, Read]], size: Callable[[int], int]) -> Iterator[Document]:
    """Documents of `texts`, (place, read) each; the one that the cut goes through comes in two parts.

    size(index): bytes of a text; their sum says where the cut is, whatever the tokenizer makes of them.
    """
    sizes = [size(index) for index in range(len(texts))]
    left = sum(sizes) - sum(sizes) // HOLDOUT  # bytes of training text that are still to come
    for (where, read), length in zip(texts, sizes, strict=True):
        if left >= length:
            parts = [Document("train", where, read())]
        elif left <= 0:
            parts = [Document("val", where, read())]
        else:
            cut = _border(read(), left)
            parts = [
                Document("train", where, _between(read(), 0, cut), closed=cut >= length),
                Document("val", where, _between(read(), cut, length), offset=cut),
            ]
        left -= length
        yield from filter(None, map(with_text, parts))


def _border(chunks: Iterator[bytes], cut: int) -> int:
    """`cut`, or the byte after it at which a UTF-8 character begins; other bytes than UTF-8 move it by at most 3."""
    around, seen = b"", 0
    for chunk in chunks:
        around += chunk[max(cut - seen, 0) :][: 4 - len(around)]
        seen += len(chunk)
        if len(around) == 4:
            break
    for moved, byte in enumerate(around[:4]):
        if byte & 0xC0 != 0x80:
            return cut + moved
    return cut


def _between(chunks: Iterator[bytes], start: int, stop: int) -> Iterator[bytes]:
    """Bytes start..stop-1 of a text that comes in pieces."""
    seen = 0
    for chunk in chunks:
        yield chunk[max(start - seen, 0) : max(stop - seen, 0)]
        seen += len(chunk)
        if seen >= stop:
            return
