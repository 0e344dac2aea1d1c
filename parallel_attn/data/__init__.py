"""Corpora, tokenizers, tokens on disk, and the order in which samples are seen."""

from parallel_attn.data.batches import IGNORE, Batch, EvalBatches, TrainBatches
from parallel_attn.data.corpus import Corpus
from parallel_attn.data.order import SampleOrder
from parallel_attn.data.prepare import prepare_tokens
from parallel_attn.data.stdlib import StdlibCorpus
from parallel_attn.data.text import TextCorpus
from parallel_attn.data.tokenizer import ByteTokenizer
from parallel_attn.data.tokens import TokenFile, TokenSplits, fingerprint, sample_count

__all__ = [
    "IGNORE",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "EvalBatches",
    "SampleOrder",
    "StdlibCorpus",
    "TextCorpus",
    "TokenFile",
    "TokenSplits",
    "TrainBatches",
    "fingerprint",
    "prepare_tokens",
    "sample_count",
]
