"""Text as its tokens come: no byte of an unfinished character is printed."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from parallel_attn.data import Tokenizer

CONTEXT_TOKENS = 8
"""Tokens before the new one with which it is decoded: some tokenizers put spaces by what stands before."""


class TextStream:
    """Turns tokens into text one by one, after those of a prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ids = list(prompt[-CONTEXT_TOKENS:])
        self.told = len(self.ids)  # tokens whose text is out
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that is certain now; empty while a character is unfinished."""
        self.ids.append(token)
        before, whole = self.tokenizer.decode(self.ids[: self.told]), self.tokenizer.decode(self.ids)
        if self.tokenizer.token_bytes() is None and whole.endswith("\ufffd".encode()):
            return ""  # decoded as text: half a character shows as this one
        return self._tell(before, whole)

    def end(self) -> str:
        """What was held back."""
        text = self._tell(self.tokenizer.decode(self.ids[: self.told]), self.tokenizer.decode(self.ids))
        return text + self.decoder.decode(b"", final=True)

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of all tokens, as it would come one by one."""
        return "".join([self.feed(token) for token in tokens]) + self.end()

    def _tell(self, before: bytes, whole: bytes) -> str:
        self.ids, self.told = self.ids[-CONTEXT_TOKENS:], min(len(self.ids), CONTEXT_TOKENS)
        return self.decoder.decode(whole[len(before) :])
