"""A corpus: documents in a fixed order, each of them training or validation text.

How the text is split is part of the corpus (and of the cache key), and never depends on the tokenizer: two runs are
only comparable on the same split, and bits per byte only on the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from parallel_attn.errors import SettingsError

CHUNK_BYTES = 1 << 20  # text is read in pieces: one giant file needs no more memory than a small one
HOLDOUT = 20  # one part in twenty (5 %) is validation text
SPLITS = ("train", "val")

SPLIT_BY_FILE = f"files with sha256(name) % {HOLDOUT} == 0"
SPLIT_TAIL = f"last 1/{HOLDOUT} of the bytes"
SPLIT_BY_DOCUMENT = f"every {HOLDOUT}th document"
SPLIT_GIVEN = "own files"


@dataclass
class Document:
    """One document, or the part of one on this side of a cut. Its chunks are read once, before the next document.

    where: the place, for messages. offset: bytes of that place before the first chunk. closed: the document ends here
    (only the training part of a document that is cut in two does not).
    """

    split: str
    where: str
    chunks: Iterable[bytes]
    offset: int = 0
    closed: bool = True


class Corpus:
    """Base of all corpora. A subclass has its own `Config` dataclass (the schema of its YAML), with at least

    num_workers: int = 0         # processes that tokenise; 0: this one
    documents: bool = False      # attention stays inside a document
    cache_dir: str | None = None
    """

    def __init__(self, config):
        self.config = config
        self.nulls = 0
        """Records without text (null) that the last reading left out."""
        self.pinned: str | None = None
        """What exactly is read, where the settings leave it open (a commit); kept beside the content key."""

    # What a subclass says

    def label(self, split: str) -> str:
        """`key=value` of the setting that names this split, for messages."""
        raise NotImplementedError

    @property
    def split_rule(self) -> str:
        """One of the SPLIT_ words."""
        raise NotImplementedError

    @property
    def reading(self) -> str:
        """How documents come out of the content (the field, for example): part of the cache key."""
        return ""

    def documents(self) -> Iterator[Document]:
        """All documents in their order; those without text are left out. May be called again.

        Raises SettingsError naming the place where the text cannot be read.
        """
        raise NotImplementedError

    def stat_parts(self) -> list[bytes]:
        """What tells this corpus from others without reading it. Raises OSError where a file has gone."""
        raise NotImplementedError

    def content_parts(self, on_bytes: Callable[[int], None]) -> list[bytes]:
        """What the content is, wherever it lies. May read all of it: on_bytes(n) after each piece. May set `pinned`."""
        raise NotImplementedError

    def youngest(self) -> float:
        """Time of the last change of any file; 0 where there is none."""
        return 0.0

    def text_bytes(self) -> int | None:
        """About how many bytes of text there are; None where nobody knows."""
        return None

    own_split = "data.val_path"
    """The key that names validation text of its own."""

    # What every corpus has

    def check(self) -> None:
        """Stop before any work where the corpus cannot be used. Cheap, without a collective. Raises SettingsError."""
        if self.config.num_workers < 0:
            raise SettingsError(
                f"data.num_workers={self.config.num_workers}: must not be negative; 0 tokenises in this process, "
                "N in N processes"
            )

    @property
    def cache_dir(self) -> str | None:
        return self.config.cache_dir

    def rules(self, split: str) -> str:
        """How this split came about where the user did not say, for messages."""
        part = {
            SPLIT_TAIL: f"the last {100 // HOLDOUT} % of the text",
            SPLIT_BY_DOCUMENT: f"one document in {HOLDOUT}",
            SPLIT_BY_FILE: f"one file in {HOLDOUT} by its name",
        }
        return part.get(self.split_rule, "") if split == "val" else ""


def with_text(document: Document) -> Document | None:
    """The document with its first chunk read ahead, or None where it is empty: an empty text is no document."""
    chunks = (chunk for chunk in document.chunks if chunk)
    for first in chunks:
        document.chunks = chain([first], chunks)
        return document
    return None


def hold_out_documents(documents: Iterable[Document]) -> Iterator[Document]:
    """Every HOLDOUT-th document becomes validation text (SPLIT_BY_DOCUMENT)."""
    for index, document in enumerate(documents, start=1):
        document.split = "val" if index % HOLDOUT == 0 else "train"
        yield document
