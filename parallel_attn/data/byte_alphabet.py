"""The alphabet of byte-level tokenizers (GPT-2 and its heirs): one printable character for each byte."""

from __future__ import annotations


def _alphabet() -> list[str]:
    """GPT-2, "Language Models are Unsupervised Multitask Learners", 2.2: printable Latin-1 bytes stand for themselves,
    the others for the characters from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_TO_CHARACTER = _alphabet()
CHARACTER_TO_BYTE = {character: byte for byte, character in enumerate(BYTE_TO_CHARACTER)}


def bytes_of(token: str) -> bytes | None:
    """The bytes that a token of a byte-level vocabulary stands for; None where it is not written in the alphabet."""
    try:
        return bytes(CHARACTER_TO_BYTE[character] for character in token)
    except KeyError:
        return None
