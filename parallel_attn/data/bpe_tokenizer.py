"""A byte-level BPE trained on the corpus' own training text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from parallel_attn.data.byte_tokenizer import END_OF_TEXT
from parallel_attn.data.cache import TokenCache
from parallel_attn.data.corpus import Corpus
from parallel_attn.data.encode import not_utf8
from parallel_attn.data.identity import digest
from parallel_attn.data.pieces import text_pieces
from parallel_attn.data.prepare import Build, Pulse
from parallel_attn.data.text_tokenizer import TextTokenizer
from parallel_attn.data.tokenizer import NotUtf8
from parallel_attn.errors import SettingsError

ALGORITHM = "byte-level bpe 2"  # part of the key of a trained tokenizer: changes with what training does
TRAINING_BYTES = 64 << 20  # more text changes few merges; at worst, all words distinct, a byte costs some 30 in memory
LONG_WORD = re.compile(r"\S{1000}|\s{1000}")  # the library's time for a word grows with the square of its length
SMALLEST = 257  # the bytes and the end of text


class BpeTokenizer(TextTokenizer):
    """Byte-level BPE (GPT-2's alphabet and word pattern): text comes back byte for byte. Ids: 0 the end of text, then
    the 256 bytes, then the merges.

    Trained once by the builder on the training text alone, kept in the token cache under the content it saw; the same
    text gives the same tokenizer. Of more than 64 MiB of training text pieces spread over all of it are used.
    """

    @dataclass
    class Config:
        vocab_size: int = 4096

    name = "bpe"

    @classmethod
    def load(cls, config, corpus, *, builder, progress=None, wait_seconds=None) -> BpeTokenizer:
        size, label = config.vocab_size, f"tokenizer.vocab_size={config.vocab_size}"
        if size < SMALLEST:
            raise SettingsError(f"{label}: must be at least {SMALLEST}, the bytes and the end of text")
        corpus.check()
        cache = TokenCache(corpus.cache_dir)

        def name(content: str) -> str:
            key = digest(
                *(part.encode() for part in (ALGORITHM, str(size), content, corpus.split_rule, corpus.reading))
            )
            return f"{key}.tokenizer"

        def look(content: str) -> BpeTokenizer | None:
            entry = cache.read_json(f"{name(content)}.json")
            return entry and cls(entry["tokenizer"], label=label, end_of_text=END_OF_TEXT)

        def build(content: str, pulse: Pulse) -> BpeTokenizer:
            text = _train(corpus, size, pulse)
            tokenizer = cls(text, label=label, end_of_text=END_OF_TEXT)
            if tokenizer.vocab_size < size:
                raise SettingsError(
                    f"{label}: the training text of {corpus.label('train')} gives only {tokenizer.vocab_size} tokens; "
                    f"{tokenizer.vocab_size} works, or give more text"
                )
            cache.write_json(f"{name(content)}.json", {"tokenizer": text})
            return tokenizer

        job = Build(corpus, cache, what=f"the tokenizer of {corpus.label('train')}", purpose=f"{ALGORITHM} {size}")
        return job.run(look, build, builder=builder, progress=progress, wait_seconds=wait_seconds)


def _train(corpus: Corpus, vocab_size: int, pulse: Pulse) -> str:
    """tokenizer.json of a BPE trained on the training text. Raises SettingsError for bytes that are no UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    failures: list[SettingsError] = []
    with pulse.alive():  # the merging says nothing while it lasts
        library.train_from_iterator(_stopping(_training_text(corpus, pulse), failures), trainer)
    if failures:
        raise failures[0]
    return library.to_str()


def _stopping(texts: Iterator[str], failures: list[SettingsError]) -> Iterator[str]:
    """The library turns an error of its iterator into one of its own: so it is kept, and the text just ends."""
    try:
        yield from texts
    except SettingsError as error:
        failures.append(error)


def _training_text(corpus: Corpus, pulse: Pulse) -> Iterator[str]:
    """Pieces of the training text, at most TRAINING_BYTES of it, taken at even distances where there is more."""
    known = corpus.text_bytes() or 0
    distance = -(-known // TRAINING_BYTES) or 1
    on_bytes = pulse.reading("training the tokenizer on")
    seen = taken = 0
    for document in corpus.documents():
        if document.split != "train":
            continue
        try:
            for piece in text_pieces(document.chunks):
                if seen % distance == 0:
                    yield from _without_long_words(piece.text)
                    taken += len(piece.text.encode())
                    on_bytes(len(piece.text))
                    if taken >= TRAINING_BYTES:
                        return
                seen += 1
        except NotUtf8 as error:
            raise not_utf8(corpus, document, error) from error


def _without_long_words(text: str) -> Iterator[str]:
    """A text in parts that hold no word longer than LONG_WORD matches; ordinary text is one part."""
    start = 0
    for found in LONG_WORD.finditer(text):
        yield text[start : found.end()]
        start = found.end()
    if start < len(text):
        yield text[start:]
