"""What makes two corpora the same: their content. And a cheap stand-in for it that every rank can compute.

- the *content key* says what the text is: for files it hashes names and bytes, which takes seconds for 2 GB;
- the *stat key* hashes place, size and times of the files. It takes a `stat` per file. ctime is part of it: it cannot
  be set back, so an edit that keeps size and mtime (`cp -p`, `touch -r`) still changes the key.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from parallel_attn.data.corpus import Corpus

FORMAT = 2  # of the token files and their sidecars; part of every key
# A file system's clock ticks every few milliseconds: an edit in the same tick as the last one shows in no time stamp.
# Files this young are therefore left to settle before they are read.
SETTLE_SECONDS = 0.1


def digest(*parts: bytes) -> str:
    """sha256 over parts with their lengths, so that no two lists of parts look alike. 32 hex digits."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:32]


def stat_key(corpus: Corpus) -> str:
    """Key of the corpus as it stands: 32 hex digits. Raises OSError where a file has gone."""
    return digest(f"format {FORMAT}".encode(), corpus.split_rule.encode(), *corpus.stat_parts())


def settle(corpus: Corpus) -> None:
    """Wait until a further edit of the youngest file would show in its ctime (at most SETTLE_SECONDS)."""
    if 0 <= time.time() - corpus.youngest() < SETTLE_SECONDS:
        time.sleep(SETTLE_SECONDS)


def content_key(corpus: Corpus, on_bytes: Callable[[int], None]) -> str:
    """Key of what the text is: 32 hex digits, wherever it lies. on_bytes(n) after each piece that is read for it."""
    return digest(*corpus.content_parts(on_bytes))


def entry_key(content: str, tokenizer_fingerprint: str, corpus: Corpus) -> str:
    """Key of a cache entry: what the tokens depend on, and nothing else. 32 hex digits."""
    parts = (f"format {FORMAT}", content, tokenizer_fingerprint, corpus.split_rule, corpus.reading)
    return digest(*(part.encode() for part in parts))


def claim_key(stat: str, purpose: str) -> str:
    """Key of the sign of life of whoever builds something (`purpose`) from a corpus. 32 hex digits."""
    return digest(b"claim", stat.encode(), purpose.encode())
