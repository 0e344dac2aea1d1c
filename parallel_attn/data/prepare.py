"""Tokens of a corpus, from the cache or built into it, on every rank and without a collective.

A rank that need not build waits for files, never in a collective: tokenising may take longer than any timeout of a
process group. How do the others know which entry to wait for, without hashing the corpus once per rank?
1. every rank computes the stat key of its own files (cheap);
2. the builder hashes the content once, leaves `stat key -> content key` in the cache, then builds the entry if missing;
3. the others look for that note, then for the entry.
Who waits and sees no sign of life from a builder for TAKEOVER_SECONDS builds by itself: so each rank may have a cache
folder of its own (another node's disk), or see other time stamps. Builders at the same time write the same bytes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import numpy as np

from parallel_attn.data.cache import TokenCache
from parallel_attn.data.corpus import HOLDOUT, SPLIT_TAIL, SPLITS, Corpus
from parallel_attn.data.identity import FORMAT, claim_key, content_key, entry_key, settle, stat_key
from parallel_attn.data.tokens import TokenFile, TokenSplits, TokenWriter, sample_count
from parallel_attn.errors import SettingsError

POLL_SECONDS = 0.1
REPORT_SECONDS = 30.0
TAKEOVER_SECONDS = 30.0
SIGN_SECONDS = 1.0

Progress = Callable[[str], None]


def prepare_tokens(
    corpus: Corpus,
    tokenizer,
    *,
    builder: bool,
    seq_len: int,
    wait_seconds: float | None = None,
    progress: Progress | None = None,
) -> TokenSplits:
    """The train and val tokens of a corpus. Call on every rank; best with builder=True on one rank per machine.

    wait_seconds: how long a rank that does not build waits; None: until the launcher ends it.
    progress(line): told what is being done or waited for, every REPORT_SECONDS.
    Raises SettingsError: no usable text, a cache folder that cannot be written, an id outside the vocabulary, files
    that change meanwhile, a split shorter than one sample (seq_len + 1 tokens).
    """
    if seq_len < 1:
        raise SettingsError(f"train.seq_len={seq_len}: must be at least 1")
    progress = progress or (lambda line: None)
    corpus.check()
    cache = TokenCache(corpus.cache_dir)
    stat = _stat_key(corpus)
    splits = _load(corpus, tokenizer, cache, stat)
    if splits is None:
        cache.require_writable()
        if not builder:
            splits = _wait(corpus, tokenizer, cache, stat, wait_seconds, progress)
        if splits is None:
            splits = _build(corpus, tokenizer, cache, progress)
    for name, tokens in zip(SPLITS, (splits.train, splits.val), strict=True):
        _check_length(corpus, name, tokens, seq_len)
    return splits


def _load(corpus: Corpus, tokenizer, cache: TokenCache, stat: str) -> TokenSplits | None:
    content = cache.content_of(stat)
    return content and cache.load(entry_key(content, tokenizer.fingerprint, corpus.split_rule))


def _stat_key(corpus: Corpus) -> str:
    try:
        return stat_key(corpus)
    except OSError as error:
        reason = f"cannot find {error.filename} any more ({error.strerror})"
        raise SettingsError(f"{corpus.label('train')}: {reason}; start again when the files are complete") from error


def _wait(
    corpus: Corpus, tokenizer, cache: TokenCache, stat: str, wait_seconds: float | None, progress: Progress
) -> TokenSplits | None:
    """Poll until the entry is there; None when no builder has shown itself for a while and this rank should build."""
    what = corpus.label("train")
    claim = claim_key(stat, tokenizer.fingerprint)
    began = reported = seen_at = time.monotonic()
    seen = cache.last_sign(claim)
    # not all at once: the first one to take over gives a sign that holds the others back
    patience = TAKEOVER_SECONDS * random.Random(os.getpid()).uniform(1.0, 1.3)
    while (splits := _load(corpus, tokenizer, cache, stat)) is None:
        now = time.monotonic()
        sign = cache.last_sign(claim)
        if sign != seen:
            seen, seen_at = sign, now
        if wait_seconds is not None and now - began > wait_seconds:
            raise cache.error(f"waited {wait_seconds:g} s for another rank to write the tokens of {what}")
        if now - seen_at > patience:
            progress(f"no other rank is building the tokens of {what} in {cache.folder}: building here")
            return None
        if now - reported > REPORT_SECONDS:
            reported = now
            progress(f"waiting {now - began:.0f} s for the tokens of {what} in {cache.folder}")
        time.sleep(POLL_SECONDS)
    return splits


def _build(corpus: Corpus, tokenizer, cache: TokenCache, progress: Progress) -> TokenSplits:
    settle(corpus)
    before = _stat_key(corpus)
    pulse = _Pulse(corpus, cache, claim_key(before, tokenizer.fingerprint), progress)
    cache.remove_stale()
    content = cache.content_of(before)
    if content is None:
        content = content_key(corpus, pulse.reading("hashing"))
        _require_unchanged(corpus, before)
        cache.remember_content(before, content)
    key = entry_key(content, tokenizer.fingerprint, corpus.split_rule)
    if (splits := cache.load(key)) is not None:
        return splits  # the same text under another path or time stamp
    with cache.writing(f"{key}.bin") as handle:
        writer = TokenWriter(handle, tokenizer.vocab_size, corpus.label("train"))
        train_count = _encode(corpus, tokenizer, writer, pulse.reading("tokenizing"))
        _require_unchanged(corpus, before)
    entry = {
        "format": FORMAT,
        "dtype": writer.dtype.str,
        "count": writer.count,
        "train_count": train_count,  # the first ones; the rest is val
        "sha256": writer.sha256(),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "source": corpus.label("train"),
        "content": content,
        "split_rule": corpus.split_rule,
    }
    cache.write_json(f"{key}.json", entry)
    splits = cache.load(key)
    if splits is None:
        raise cache.error("the tokens just written cannot be read back")
    return splits


def _encode(corpus: Corpus, tokenizer, writer: TokenWriter, on_bytes: Callable[[int], None]) -> int:
    """Write train, then val, each document closed by end_of_text. Returns how many tokens are train."""
    end = np.array([tokenizer.end_of_text])
    counts = {}
    for split in SPLITS:
        for source in corpus.sources(split):
            for ids in tokenizer.encode_document(corpus.chunks(split, source)):
                writer.write(ids)
                on_bytes(len(ids))
            writer.write(end)
        counts[split] = writer.count
    return writer.count - writer.count // HOLDOUT if corpus.split_rule == SPLIT_TAIL else counts["train"]


def _require_unchanged(corpus: Corpus, before: str) -> None:
    if _stat_key(corpus) != before:
        raise SettingsError(f"{corpus.label('train')}: files changed while read; start again when they are complete")


def _check_length(corpus: Corpus, split: str, tokens: TokenFile, seq_len: int) -> None:
    if sample_count(tokens, seq_len) >= 1:
        return
    tail = split == "val" and corpus.split_rule == SPLIT_TAIL
    part = {"train": "training text", "val": "validation text"}[split] + (
        f", the last {100 // HOLDOUT} %," if tail else ""
    )
    cure = "give more text, a smaller train.seq_len" + (", or data.val_path" if tail else "")
    raise SettingsError(
        f"{corpus.label(split)}: the {part} has {tokens.count} tokens, one sample takes {seq_len + 1} "
        f"(train.seq_len={seq_len} and one more); {cure}"
    )


class _Pulse:
    """Signs of life to the ranks that wait, and lines of progress to the user, while a build goes on."""

    def __init__(self, corpus: Corpus, cache: TokenCache, claim: str, progress: Progress):
        self.what, self.cache, self.claim, self.progress = corpus.label("train"), cache, claim, progress
        self.signed = self.reported = time.monotonic()
        cache.sign_of_life(claim)

    def reading(self, verb: str) -> Callable[[int], None]:
        """A function to be called with the size of each piece that has been dealt with."""
        done = 0
        self.progress(f"{verb} {self.what}")

        def on_bytes(size: int) -> None:
            nonlocal done
            done += size
            now = time.monotonic()
            if now - self.signed > SIGN_SECONDS:
                self.signed = now
                self.cache.sign_of_life(self.claim)
            if now - self.reported > REPORT_SECONDS:
                self.reported = now
                self.progress(f"{verb} {self.what}: {done / 1e6:.0f} million done")

        return on_bytes
