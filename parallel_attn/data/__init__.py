"""Corpora, tokenizers, tokens on disk, and the order in which samples are seen."""

from parallel_attn.data.batches import IGNORE, Batch, EvalBatches, TrainBatches
from parallel_attn.data.bpe_tokenizer import BpeTokenizer
from parallel_attn.data.byte_tokenizer import ByteTokenizer
from parallel_attn.data.corpus import Corpus, Document
from parallel_attn.data.file_tokenizer import FileTokenizer
from parallel_attn.data.hub import HubCorpus
from parallel_attn.data.order import SampleOrder
from parallel_attn.data.prepare import prepare_tokens
from parallel_attn.data.stdlib import StdlibCorpus
from parallel_attn.data.text import TextCorpus
from parallel_attn.data.tokenizer import Tokenizer
from parallel_attn.data.tokens import TokenFile, TokenSplits, fingerprint, sample_count

__all__ = [
    "IGNORE",
    "Batch",
    "BpeTokenizer",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "EvalBatches",
    "FileTokenizer",
    "HubCorpus",
    "SampleOrder",
    "StdlibCorpus",
    "TextCorpus",
    "TokenFile",
    "TokenSplits",
    "Tokenizer",
    "TrainBatches",
    "fingerprint",
    "prepare_tokens",
    "sample_count",
]
