"""Bytes come back as they were, whatever they are."""

import numpy as np
import pytest

from parallel_attn.data import ByteTokenizer, FileTokenizer
from parallel_attn.data.corpus import CHUNK_BYTES
from tests.data.helpers import all_tokens, prepare
from tests.data.tokenizer_files import ENDS, kinds

TEXTS = {
    "lf": b"one\ntwo\n\nthree\n",
    "crlf": b"one\r\ntwo\r\n\r\nthree\r\n",
    "cr": b"one\rtwo\r\rthree\r",
    "mixed": b"one\r\ntwo\nthree\rfour\n\r",
    "bom": b"\xef\xbb\xbfone\n",
    "form feed": b"one\x0ctwo\x0b\x1cthree",
    "line separator": "one\u2028two\u2029three\u0085four".encode(),
    "invalid utf-8": b"\xff\xfe\x00 half a character: \xe2\x82",
    "nul": b"a\x00b\x1a",
    "only newlines": b"\n\n\n\n\n\n\n\n\n\n\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_round_trip_through_files(text, tmp_path):
    (tmp_path / "train.txt").write_bytes(text)
    (tmp_path / "val.txt").write_bytes(b"v" * 20)
    splits = prepare(tmp_path / "train.txt", tmp_path / "cache", tmp_path / "val.txt", seq_len=2)
    ids = all_tokens(splits.train)
    assert ByteTokenizer().decode(ids) == text
    assert ids[-1] == 256 and len(ids) == len(text) + 1  # the document's end stands there, once, and is no text


def test_characters_across_reading_pieces(tmp_path):
    """A multi-byte character cut by the border of two pieces, and bytes that are no character at all."""
    text = b"a" * (CHUNK_BYTES - 1) + "€".encode() * 3 + b"\xff\xfe\x00" + b"b" * CHUNK_BYTES + "ü".encode()
    (tmp_path / "train.txt").write_bytes(text)
    (tmp_path / "val.txt").write_bytes(b"v" * 20)
    splits = prepare(tmp_path / "train.txt", tmp_path / "cache", tmp_path / "val.txt")
    assert ByteTokenizer().decode(all_tokens(splits.train)) == text


def test_bytes_of_tokens():
    sizes = ByteTokenizer().token_bytes()
    assert sizes.dtype == np.int64 and sizes.shape == (257,)
    assert sizes[256] == 0 and (sizes[:256] == 1).all()


@pytest.mark.parametrize("wrong", [257, -1, 65536 + 65])
def test_decode_refuses_ids_outside_the_vocabulary(wrong):
    with pytest.raises(ValueError, match=str(wrong)):
        ByteTokenizer().decode([65, wrong])


@pytest.mark.parametrize(
    "kind, text, lacking",
    [
        ("byte level, nfc", "e\u0301 \x00 ☃", None),
        ("llama", "☃", None),  # in bytes
        ("t5", "the \ufb01 dog", None),  # folded, not lacking
        ("t5", "the ☃ dog", "☃"),
        ("t5", "the\x01dog", "\x01"),
        ("bert", "The  DÖG\n", None),
        ("bert", "a brown☃fox", "☃"),
    ],
)
def test_what_no_token_stands_for(kind, text, lacking):
    tokenizer = FileTokenizer(kinds()[kind], label="x", end_of_text=ENDS.get(kind))
    assert tokenizer.lacks(text) == lacking


def test_words_that_are_looked_up_whole():
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"a": 0, "dog": 1, "[UNK]": 2, "</s>": 3, "g": 4, "o": 5, "d": 6}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = FileTokenizer(library.to_str(), label="x")
    assert tokenizer.lacks("a  dog") is None and tokenizer.lacks("a god") == "god" and tokenizer.lacks("a cat") == "c"
