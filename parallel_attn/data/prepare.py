"""Tokens of a corpus, from the cache or built into it, on every rank and without a collective.

A rank that need not build waits for files, never in a collective: tokenising may take longer than any timeout of a
process group. How do the others know which entry to wait for, without hashing the corpus once per rank?
1. every rank computes the stat key of its own files (cheap);
2. the builder finds the content key once, leaves `stat key -> content key` in the cache, then builds what is missing;
3. the others look for that note, then for the entry; a builder that fails leaves its reason, which all of them raise.
Who waits and sees no sign of life from a builder for TAKEOVER_SECONDS builds by itself: so each rank may have a cache
folder of its own (another node's disk), or see other time stamps. Builders at the same time write the same bytes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from parallel_attn.data.cache import TokenCache
from parallel_attn.data.corpus import SPLITS, Corpus
from parallel_attn.data.encode import write_tokens
from parallel_attn.data.identity import claim_key, content_key, entry_key, settle, stat_key
from parallel_attn.data.tokenizer import Progress, Tokenizer
from parallel_attn.data.tokens import TokenFile, TokenSplits, sample_count
from parallel_attn.errors import SettingsError

POLL_SECONDS = 0.1
REPORT_SECONDS = 30.0
TAKEOVER_SECONDS = 30.0
SIGN_SECONDS = 1.0

Result = TypeVar("Result")


def prepare_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    builder: bool,
    seq_len: int,
    wait_seconds: float | None = None,
    progress: Progress | None = None,
) -> TokenSplits:
    """The train and val tokens of a corpus. Call on every rank; best with builder=True on one rank per machine.

    wait_seconds: how long a rank that does not build waits; None: until the launcher ends it.
    progress(line): told what is being done or waited for, every REPORT_SECONDS.
    Raises SettingsError: no usable text, a cache folder that cannot be written, an id outside the vocabulary, bytes
    that are not UTF-8 under a text tokenizer, files that change meanwhile, a split shorter than one sample (seq_len +
    1 tokens).
    """
    if seq_len < 1:
        raise SettingsError(f"train.seq_len={seq_len}: must be at least 1")
    corpus.check()
    cache = TokenCache(corpus.cache_dir)

    def look(content: str) -> TokenSplits | None:
        return cache.load(entry_key(content, tokenizer.fingerprint, corpus))

    def build(content: str, pulse: Pulse) -> TokenSplits:
        key = entry_key(content, tokenizer.fingerprint, corpus)
        on_bytes = pulse.reading("tokenizing")
        entry = write_tokens(corpus, tokenizer, cache, key, on_bytes, unchanged=pulse.require_unchanged)
        if corpus.nulls:
            pulse.progress(f"{corpus.label('train')}: {corpus.nulls} records without text (null) left out")
        cache.write_json(f"{key}.json", entry | {"content": content})
        splits = cache.load(key)
        if splits is None:
            raise cache.error("the tokens just written cannot be read back")
        return splits

    job = Build(corpus, cache, what=f"the tokens of {corpus.label('train')}", purpose=tokenizer.fingerprint)
    splits = job.run(look, build, builder=builder, progress=progress, wait_seconds=wait_seconds)
    for name, tokens in zip(SPLITS, (splits.train, splits.val), strict=True):
        _check_length(corpus, name, tokens, seq_len)
    return splits


class Build:
    """Something made from a corpus and kept in the cache: one rank makes it, the others wait for its files."""

    def __init__(self, corpus: Corpus, cache: TokenCache, *, what: str, purpose: str):
        """what: for messages. purpose: tells this work on the corpus from other work on it."""
        self.corpus, self.cache, self.what, self.purpose = corpus, cache, what, purpose

    def run(
        self,
        look: Callable[[str], Result | None],
        build: Callable[[str, Pulse], Result],
        *,
        builder: bool,
        progress: Progress | None,
        wait_seconds: float | None,
    ) -> Result:
        """look(content key): what the cache has, or None. build(content key, pulse): makes it and leaves it there."""
        progress = progress or (lambda line: None)
        stat = require_stat_key(self.corpus)
        claim = claim_key(stat, self.purpose)
        old_failure = self.cache.failure(claim)
        found = self._look(stat, look)
        if found is None:
            self.cache.require_writable()
            if not builder:
                found = self._wait(stat, claim, look, old_failure, progress, wait_seconds)
        if found is None:
            try:
                found = self._build(claim, look, build, progress)
            except SettingsError as error:
                self.cache.leave_failure(claim, str(error))
                raise
        return found

    def _look(self, stat: str, look: Callable[[str], Result | None]) -> Result | None:
        note = self.cache.note_of(stat)
        return note and look(note["content"])

    def _wait(self, stat, claim, look, old_failure, progress, wait_seconds):
        """Poll until it is there; None when no builder has shown itself for a while and this rank should build."""
        where = self.cache.folder
        began = reported = seen_at = time.monotonic()
        seen = self.cache.last_sign(claim)
        # not all at once: the first one to take over gives a sign that holds the others back
        patience = TAKEOVER_SECONDS * random.Random(os.getpid()).uniform(1.0, 1.3)
        while (found := self._look(stat, look)) is None:
            now = time.monotonic()
            sign = self.cache.last_sign(claim)
            if sign != seen:
                seen, seen_at = sign, now
            failure = self.cache.failure(claim)
            if failure and failure != old_failure:
                raise SettingsError(failure["error"])
            if wait_seconds is not None and now - began > wait_seconds:
                raise self.cache.error(f"waited {wait_seconds:g} s for another rank to write {self.what}")
            if now - seen_at > patience:
                progress(f"no other rank is building {self.what} in {where}: building here")
                return None
            if now - reported > REPORT_SECONDS:
                reported = now
                progress(f"waiting {now - began:.0f} s for {self.what} in {where}")
            time.sleep(POLL_SECONDS)
        return found

    def _build(self, claim, look, build, progress):
        corpus, cache = self.corpus, self.cache
        settle(corpus)
        before = require_stat_key(corpus)
        pulse = Pulse(corpus, cache, claim, before, progress)
        cache.remove_stale()
        note = cache.note_of(before)
        if note is None:
            content = content_key(corpus, pulse.reading("hashing"))
            pulse.require_unchanged()
            note = {"content": content, "pinned": corpus.pinned}
            cache.remember_note(before, note)
        corpus.pinned = note.get("pinned")
        found = look(note["content"])  # the same text under another path or time stamp
        return build(note["content"], pulse) if found is None else found


def require_stat_key(corpus: Corpus) -> str:
    try:
        return stat_key(corpus)
    except OSError as error:
        reason = f"cannot find {error.filename} any more ({error.strerror})"
        raise SettingsError(f"{corpus.label('train')}: {reason}; start again when the files are complete") from error


def _check_length(corpus: Corpus, split: str, tokens: TokenFile, seq_len: int) -> None:
    if sample_count(tokens, seq_len) >= 1:
        return
    rule = corpus.rules(split)
    part = {"train": "training text", "val": "validation text"}[split] + (f", {rule}," if rule else "")
    cure = "give more text, a smaller train.seq_len" + (f", or {corpus.own_split}" if rule else "")
    raise SettingsError(
        f"{corpus.label(split)}: the {part} has {tokens.count} tokens, one sample takes {seq_len + 1} "
        f"(train.seq_len={seq_len} and one more); {cure}"
    )


class Pulse:
    """Signs of life to the ranks that wait, and lines of progress to the user, while a build goes on."""

    def __init__(self, corpus: Corpus, cache: TokenCache, claim: str, stat: str, progress: Progress):
        self.corpus, self.cache, self.claim, self.stat, self.progress = corpus, cache, claim, stat, progress
        self.signed = self.reported = time.monotonic()
        cache.sign_of_life(claim)

    def reading(self, verb: str) -> Callable[[int], None]:
        """A function to be called with the bytes of each piece that has been dealt with (0: still at it)."""
        done, began, what = 0, time.monotonic(), self.corpus.label("train")
        self.progress(f"{verb} {what}")

        def on_bytes(size: int) -> None:
            nonlocal done
            done += size
            now = time.monotonic()
            if now - self.signed > SIGN_SECONDS:
                self.signed = now
                self.cache.sign_of_life(self.claim)
            if now - self.reported > REPORT_SECONDS:
                self.reported = now
                speed = done / 1e6 / max(now - began, 1e-9)
                self.progress(f"{verb} {what}: {done / 1e6:.0f} million bytes done, {speed:.1f} million per second")

        return on_bytes

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Signs of life from a thread, for work that says nothing while it lasts."""
        over = threading.Event()

        def sign() -> None:
            while not over.wait(SIGN_SECONDS):
                self.cache.sign_of_life(self.claim)

        thread = threading.Thread(target=sign, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def require_unchanged(self) -> None:
        """Raises SettingsError where a file is not what it was when the build began."""
        if require_stat_key(self.corpus) != self.stat:
            raise SettingsError(
                f"{self.corpus.label('train')}: files changed while read; start again when they are complete"
            )
