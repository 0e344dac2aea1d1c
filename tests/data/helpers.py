"""Small corpora, and a way to try what another user may read."""

from __future__ import annotations

import os
import pickle

from parallel_attn.data import ByteTokenizer, TextCorpus, prepare_tokens
from parallel_attn.errors import SettingsError

NOBODY = 65534


def text_corpus(path, cache, val_path=None, **more) -> TextCorpus:
    def plain(value):
        return [str(entry) for entry in value] if isinstance(value, list) else value and str(value)

    return TextCorpus(TextCorpus.Config(path=plain(path), val_path=plain(val_path), cache_dir=str(cache), **more))


CORPUS_KEYS = ("field", "num_workers", "documents")


def prepare(path, cache, val_path=None, *, seq_len=8, builder=True, tokenizer=None, **more):
    tokenizer = tokenizer or ByteTokenizer()
    corpus = text_corpus(path, cache, val_path, **{key: more.pop(key) for key in CORPUS_KEYS if key in more})
    return prepare_tokens(corpus, tokenizer, builder=builder, seq_len=seq_len, **more)


def documents(corpus) -> list[tuple[str, bytes]]:
    """(split, text) of all documents of a corpus."""
    return [(document.split, b"".join(document.chunks)) for document in corpus.documents()]


def all_tokens(tokens):
    return tokens.read(0, tokens.count)


def text_of(splits) -> bytes:
    """The text of train and val, one behind the other."""
    return b"".join(ByteTokenizer().decode(all_tokens(tokens)) for tokens in (splits.train, splits.val))


def as_plain_user(function):
    """What `function()` returns or raises as a user without root's rights (root may read any file)."""
    if os.geteuid() != 0:
        return function()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                answer = (True, function())
            except (SettingsError, OSError) as error:  # the parent raises it
                answer = (False, error)
            with os.fdopen(writer, "wb") as handle:
                handle.write(pickle.dumps(answer))
        finally:
            os._exit(0)  # anything else leaves the pipe empty, which the parent cannot read either
    os.close(writer)
    with os.fdopen(reader, "rb") as handle:
        good, answer = pickle.loads(handle.read())
    os.waitpid(child, 0)
    if not good:
        raise answer
    return answer
