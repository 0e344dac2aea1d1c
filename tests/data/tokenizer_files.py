"""tokenizer.json texts of the kinds that people bring along, each trained here on a few lines."""

from __future__ import annotations

import functools
import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog, and then it rests for a while under the old tree.",
    "def encode(text):\n    return [ord(c) for c in text]\n",
    "Größe, naïve café, 日本語 и русский 😀 and some more words to learn from\tat the end",
] * 20


def byte_level(*, end="<|endoftext|>", add_prefix_space=False, normalizer=None) -> str:
    """GPT-2's kind; also with a normaliser (Qwen: NFC) or a space put before each text (RoBERTa)."""
    library = Tokenizer(models.BPE())
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(LINES, trainer)
    return library.to_str()


def llama_like() -> str:
    """SentencePiece BPE with byte fallback: a space before each text, spaces as ▁, the end of text with a BOS
    before."""
    library = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False, max_token_length=8
    )
    library.train_from_iterator([line for text in LINES for line in text.split()], trainer)
    spec = json.loads(library.to_str())
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if not entry["content"].startswith("<0x")]
    library = Tokenizer.from_str(json.dumps(spec))
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return library.to_str()


def bert_like() -> str:
    """WordPiece: lower case, accents and white space gone, truncation and padding switched on."""
    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    library.train_from_iterator(LINES, trainer)
    library.enable_truncation(16)
    library.enable_padding(length=16)
    library.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return library.to_str()


def t5_like() -> str:
    """Unigram with Metaspace; the end of text is an ordinary piece of the vocabulary, too."""
    library = Tokenizer(models.Unigram())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(LINES, trainer)
    return library.to_str()


def word_level() -> str:
    """Words without a token for unknown ones: some texts cannot be encoded at all."""
    library = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return library.to_str()


@functools.cache
def kinds() -> dict[str, str]:
    return {
        "byte level": byte_level(),
        "byte level, space before": byte_level(add_prefix_space=True),
        "byte level, nfc": byte_level(normalizer=normalizers.NFC()),
        "llama": llama_like(),
        "bert": bert_like(),
        "t5": t5_like(),
    }


ENDS = {"bert": "[SEP]"}
"""Where the end of text has no common name."""
