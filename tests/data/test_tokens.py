"""Tokens on disk: no id ever wraps, and what was written is read."""

import io
import pickle

import numpy as np
import pytest

from parallel_attn.data import ByteTokenizer, TokenFile, TokenSplits, fingerprint
from parallel_attn.data.tokens import TokenWriter, token_dtype
from parallel_attn.errors import SettingsError
from tests.data.helpers import all_tokens, prepare


class FakeTokenizer(ByteTokenizer):
    """As many ids as wanted: byte b is id `vocab_size - 1 - b`, so that the largest ids occur."""

    name = "fake"
    end_of_text = 0

    def __init__(self, vocab_size, beyond=0):
        self.vocab_size, self.beyond = vocab_size, beyond
        self.fingerprint = f"fake-{vocab_size}-{beyond}"

    def encode_piece(self, piece):
        return self.vocab_size - 1 + self.beyond - np.frombuffer(piece.text, np.uint8).astype(np.int64)

    def encode_with_bytes(self, piece):
        return self.encode_piece(piece), np.ones(len(piece.text), dtype=np.int64), 0


@pytest.mark.parametrize(
    "vocab_size,dtype",
    [(2, "u1"), (256, "u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4"), (100_000, "<u4"), (2**32, "<u4")],
)
def test_dtype_fits_the_vocabulary(vocab_size, dtype, tmp_path):
    assert token_dtype(vocab_size) == np.dtype(dtype)
    if vocab_size < 256:
        return
    text = bytes(range(200)) * 3
    (tmp_path / "a.txt").write_bytes(text)
    splits = prepare(tmp_path / "a.txt", tmp_path / "cache", tokenizer=FakeTokenizer(vocab_size))
    assert np.dtype(splits.train.dtype) == np.dtype(dtype)
    ids = np.concatenate([all_tokens(splits.train), all_tokens(splits.val)])
    assert ids.dtype == np.int64
    assert np.array_equal(ids, [vocab_size - 1 - byte for byte in text] + [0])  # nothing wrapped


def test_too_large_a_vocabulary():
    with pytest.raises(ValueError, match=f"vocab_size={2**32 + 1}"):
        token_dtype(2**32 + 1)


@pytest.mark.parametrize("vocab_size", [256, 257, 65536, 65537])
def test_id_beyond_the_vocabulary_is_refused(vocab_size, tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(200))
    with pytest.raises(SettingsError, match=f"token id {vocab_size}, its vocab_size is {vocab_size};"):
        prepare(tmp_path / "a.txt", tmp_path / "cache", tokenizer=FakeTokenizer(vocab_size, beyond=1))
    assert not list((tmp_path / "cache").glob("*.bin*"))  # nothing half is left


def test_negative_id_is_refused():
    writer = TokenWriter(io.BytesIO(), 300, "data.path=x")
    with pytest.raises(SettingsError, match="^data.path=x: the tokenizer gave token id -1"):
        writer.write(np.array([5, -1, 7]))
    assert writer.count == 0


@pytest.fixture
def tokens(tmp_path):
    np.arange(5000, dtype="<u2").tofile(tmp_path / "t.bin")
    return TokenFile(str(tmp_path / "t.bin"), "<u2", 12, "abc", 100, start=5)


def test_read(tokens):
    assert tokens.read(0, 12).tolist() == list(range(5, 17))
    assert tokens.read(3, 5).tolist() == [8, 9] and tokens.read(4, 4).tolist() == []
    assert type(tokens.read(0, 2)) is np.ndarray and tokens.read(0, 2).dtype == np.int64


@pytest.mark.parametrize("start,stop", [(-1, 3), (0, 13), (5, 4)])
def test_read_outside(tokens, start, stop):
    with pytest.raises(IndexError, match=f"{start}:{stop}"):
        tokens.read(start, stop)


def test_pickle_carries_no_tokens(tokens):
    tokens.read(0, 3)
    data = pickle.dumps(tokens)
    assert len(data) < 1000
    copy = pickle.loads(data)
    assert copy == tokens and copy.read(0, 3).tolist() == [5, 6, 7]


def test_fingerprint_knows_what_matters(tokens):
    def splits(**change):
        tokenizer = change.pop("tokenizer", "bytes")
        fields = {"path": "p", "dtype": "<u2", "count": 9, "sha256": "aa", "vocab_size": 257} | change
        return TokenSplits(TokenFile(**fields), TokenFile("p", "<u2", 3, "aa", 257, start=9), tokenizer)

    base = fingerprint(splits())
    assert len(base) == 16 and int(base, 16) >= 0
    assert fingerprint(splits(path="elsewhere")) == base
    for change in ({"count": 8}, {"sha256": "ab"}, {"vocab_size": 258}, {"tokenizer": "bpe"}, {"start": 1}):
        assert fingerprint(splits(**change)) != base
