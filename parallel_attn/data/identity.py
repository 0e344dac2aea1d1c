"""What makes two corpora the same: their content. And a cheap stand-in for it that every rank can compute.

- the *content key* hashes names and bytes of all files. It is exact, and reading 2 GB for it takes seconds;
- the *stat key* hashes place, size and times of the files. It takes a `stat` per file. ctime is part of it: it cannot
  be set back, so an edit that keeps size and mtime (`cp -p`, `touch -r`) still changes the key.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable

from parallel_attn.data.corpus import SPLITS, Corpus

FORMAT = 1  # of the token files and their sidecars; part of every key
# A file system's clock ticks every few milliseconds: an edit in the same tick as the last one shows in no time stamp.
# Files this young are therefore left to settle before they are read.
SETTLE_SECONDS = 0.1


def _digest(*parts: bytes) -> str:
    """sha256 over parts with their lengths, so that no two lists of parts look alike. 32 hex digits."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:32]


def stat_key(corpus: Corpus) -> str:
    """Key of the files as they stand: 32 hex digits. Raises OSError where a file has gone."""
    parts = [f"format {FORMAT}".encode(), corpus.split_rule.encode()]
    for split in SPLITS:
        for source in corpus.sources(split):
            stat = os.stat(source.path)
            parts += [split.encode(), source.name_bytes, os.fsencode(os.path.abspath(source.path))]
            parts.append(f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}".encode())
    return _digest(*parts)


def settle(corpus: Corpus) -> None:
    """Wait until a further edit of the youngest file would show in its ctime (at most SETTLE_SECONDS)."""
    youngest = max((os.stat(path).st_ctime for split in SPLITS for path in corpus.files(split)), default=0.0)
    if 0 <= time.time() - youngest < SETTLE_SECONDS:
        time.sleep(SETTLE_SECONDS)


def content_key(corpus: Corpus, on_bytes: Callable[[int], None]) -> str:
    """Key of names and bytes: 32 hex digits, wherever the files lie. Reads in pieces; on_bytes(n) after each piece."""
    parts = []
    for split in SPLITS:
        for source in corpus.sources(split):
            content = hashlib.sha256()
            for chunk in corpus.chunks(split, source):
                content.update(chunk)
                on_bytes(len(chunk))
            parts += [split.encode(), source.name_bytes, content.digest()]
    return _digest(*parts)


def entry_key(content: str, tokenizer_fingerprint: str, split_rule: str) -> str:
    """Key of a cache entry: what the tokens depend on, and nothing else. 32 hex digits."""
    return _digest(f"format {FORMAT}".encode(), content.encode(), tokenizer_fingerprint.encode(), split_rule.encode())


def claim_key(stat: str, tokenizer_fingerprint: str) -> str:
    """Key of the sign of life of whoever builds these tokens. 32 hex digits."""
    return _digest(b"claim", stat.encode(), tokenizer_fingerprint.encode())
