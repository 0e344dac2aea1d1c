"""Text as its tokens come: no byte of an unfinished character is printed."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from parallel_attn.data import Tokenizer

CONTEXT_TOKENS = 8
"""Tokens before the new one, at least, with which it is decoded: some tokenizers put spaces by what stands before."""


class TextStream:
    """Turns tokens into text one by one, after those of a prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.alone = tokenizer.token_bytes() is not None
        """Whether each token has bytes of its own, whatever stands before it."""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.ids = [] if self.alone else list(prompt)
        self.ends = [len(self.ids)]  # places in ids up to which all text was told: no character crosses them
        self.before = tokenizer.decode(self.ids)

    def feed(self, token: int) -> str:
        """The text that is certain now; empty while a character is unfinished."""
        if self.alone:
            return self.decoder.decode(self.tokenizer.decode([token]))
        self.ids.append(token)
        whole = self.tokenizer.decode(self.ids)
        if whole.endswith("\ufffd".encode()):
            return ""  # decoded as text: half a character shows as this one
        return self._tell(whole)

    def end(self) -> str:
        """What was held back."""
        if self.alone:
            return self.decoder.decode(b"", final=True)
        return self._tell(self.tokenizer.decode(self.ids)) if len(self.ids) > self.ends[-1] else ""

    def _tell(self, whole: bytes) -> str:
        if whole.startswith(self.before):
            new = whole[len(self.before) :]
        else:  # bytes that are no character have spoilt those before them, too
            new = self.tokenizer.decode(self.ids[self.ends[-1] :])
        self.ends.append(len(self.ids))
        self.before = whole
        for start in reversed(self.ends):
            context = self.tokenizer.decode(self.ids[start:]) if len(self.ids) - start >= CONTEXT_TOKENS else b""
            if context:  # empty where it holds only tokens without text: then it does not say what stands before
                self.ids, self.before = self.ids[start:], context
                self.ends = [end - start for end in self.ends if end >= start]
                break
        return new.decode("utf-8", "replace")


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of `tokens` where they stand behind a prompt: what a stream of them tells."""
    stream = TextStream(tokenizer, prompt)
    return "".join([*map(stream.feed, tokens), stream.end()])
