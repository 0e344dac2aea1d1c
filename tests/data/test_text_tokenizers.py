"""Tokenizers of text: what comes back, what is counted, what is refused. BPE by training, files of the usual kinds."""

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from parallel_attn.data import BpeTokenizer, ByteTokenizer, FileTokenizer
from parallel_attn.data import pieces as pieces_module
from parallel_attn.data.corpus import CHUNK_BYTES
from parallel_attn.data.pieces import PIECE_CHARACTERS, text_pieces
from parallel_attn.data.text_tokenizer import PROBES
from parallel_attn.data.tokenizer import NotUtf8, Piece
from parallel_attn.errors import SettingsError
from tests.data.helpers import all_tokens, prepare
from tests.data.test_tokenizer import TEXTS
from tests.data.tokenizer_files import ENDS, byte_level, kinds, word_level

UTF8 = [text for name, text in TEXTS.items() if name != "invalid utf-8"]
WORDS = "the lazy dog jumps over größe 日本語 😀 def encode(text):\n    return x\n\n\ttab  two   three".split(" ")


def from_file(tmp_path, text, **more) -> FileTokenizer:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    config = FileTokenizer.Config(path=str(tmp_path / "tokenizer.json"), **more)
    return FileTokenizer.load(config, None, builder=False)


@pytest.fixture(params=list(kinds()))
def any_kind(request) -> FileTokenizer:
    return FileTokenizer(kinds()[request.param], label="tokenizer.path=x", end_of_text=ENDS.get(request.param))


def prose(characters, seed=0) -> str:
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(characters))[:characters]


@pytest.mark.parametrize("text", [*UTF8, *(text.encode() for text in PROBES.values())])
def test_byte_level_text_comes_back(text):
    tokenizer = FileTokenizer(byte_level(), label="x")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.notes() == []
    assert tokenizer.token_bytes()[ids].sum() == len(text)


def test_what_changes_is_noted(any_kind):
    """A text comes back, or its kind stands in the notes."""
    notes = " ".join(any_kind.notes())
    for name, text in PROBES.items():
        came_back = any_kind.decode(any_kind.encode(text.encode())) == text.encode()
        assert came_back != (name in notes or "without a space" in notes and text[0] != " "), name


def test_notes_by_kind():
    notes = {name: FileTokenizer(text, label="L", end_of_text=ENDS.get(name)).notes() for name, text in kinds().items()}
    assert notes["byte level"] == notes["llama"] == []
    assert notes["byte level, space before"] == ["L: a text that begins without a space comes back with one"]
    assert notes["byte level, nfc"] == ["L: text does not come back byte for byte: accents (normalizer NFC)"]
    assert "capital letters" in notes["bert"][0] and "normalizer BertNormalizer" in notes["bert"][0]
    assert notes["t5"][-1] == "L: a text that spells </s> is taken for the end of a document"


@pytest.mark.parametrize("text", [*UTF8, *(text.encode() for text in PROBES.values()), b"   ", b"a", b" </s><s> x"])
def test_bytes_are_counted_exactly(any_kind, text):
    ids, counts, rest = any_kind.encode_with_bytes(Piece(text.decode(), ""))
    assert len(ids) == len(counts) and (counts >= 0).all() and counts.sum() + rest == len(text)
    assert np.array_equal(ids, any_kind.encode(text))
    assert rest == 0 or len(ids) == 0


def test_bytes_are_counted_where_they_are(any_kind):
    """Not only the sum: the tokens of a word stand for the bytes of that word."""
    for text in ("lazy dog", "größe dog", "日本語 dog"):
        ids, counts, _ = any_kind.encode_with_bytes(Piece(text, ""))
        behind = any_kind.encode_with_bytes(Piece(" dog", text.split()[0]))[0]
        assert counts[-len(behind) :].sum() == len(" dog")


def test_special_tokens_in_a_text_are_text():
    for name in ("byte level", "llama", "bert"):
        tokenizer = FileTokenizer(kinds()[name], label="x", end_of_text=ENDS.get(name))
        special = {"byte level": "<|endoftext|>", "llama": "</s> <s> <unk>", "bert": "[SEP] [CLS]"}[name]
        ids = tokenizer.encode(f"before {special} after".encode())
        assert tokenizer.end_of_text not in ids
        if name != "bert":
            assert tokenizer.decode(ids).decode() == f"before {special} after"
    plain = Library.from_str(kinds()["byte level"]).encode("<|endoftext|>").ids
    assert plain == [0]  # which the library itself would have done


def test_nothing_is_cut_off_padded_or_put_around():
    """The file asks for 16 tokens with [CLS] and [SEP] around."""
    tokenizer = FileTokenizer(kinds()["bert"], label="x", end_of_text="[SEP]")
    assert len(Library.from_str(kinds()["bert"]).encode("dog").ids) == 16
    assert len(tokenizer.encode(b"dog")) == 1 and len(tokenizer.encode(b"dog " * 100)) == 100


def test_added_tokens_count_for_the_vocabulary(tmp_path):
    library = Library.from_str(byte_level())
    size = library.get_vocab_size()
    library.add_tokens(["<extra>", "zebra"])
    tokenizer = from_file(tmp_path, library.to_str())
    assert tokenizer.vocab_size == size + 2
    ids = tokenizer.encode(b"a zebra!")
    assert size + 1 in ids and tokenizer.decode(ids) == b"a zebra!" and tokenizer.token_bytes()[size + 1] == 5


def test_ends_of_text(tmp_path):
    for name in ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|end▁of▁sentence|>"):
        tokenizer = from_file(tmp_path, byte_level(end=name))
        assert tokenizer.end_of_text == 0 and tokenizer.token_bytes()[0] == 0
        assert tokenizer.decode([0, *tokenizer.encode(b"text"), 0]) == b"text"
    assert from_file(tmp_path, byte_level(end="<stop>"), end_of_text="<stop>").end_of_text == 0
    with pytest.raises(
        SettingsError, match=r"^tokenizer\.path=.*: has none of <\|endoftext\|>, .*set tokenizer\.end_of_text.*<stop>"
    ):
        from_file(tmp_path, byte_level(end="<stop>"))
    with pytest.raises(SettingsError, match=r"^tokenizer\.end_of_text=<end>: not in the vocabulary of .*; set a token"):
        from_file(tmp_path, byte_level(end="<stop>"), end_of_text="<end>")


def test_an_end_of_text_that_the_file_does_not_call_special(tmp_path):
    spec = json.loads(byte_level())
    spec["added_tokens"][0]["special"] = False
    tokenizer = from_file(tmp_path, json.dumps(spec))
    assert tokenizer.end_of_text == 0 and 0 not in tokenizer.encode(b"a <|endoftext|> b")
    spec["added_tokens"] = []
    tokenizer = from_file(tmp_path, json.dumps(spec))
    assert tokenizer.end_of_text == 0 and 0 not in tokenizer.encode(b"a <|endoftext|> b") and tokenizer.notes() == []


def test_dropout_is_off(tmp_path):
    spec = json.loads(byte_level())
    spec["model"]["dropout"] = 0.5
    tokenizer, text = from_file(tmp_path, json.dumps(spec)), prose(500).encode()
    assert all(np.array_equal(tokenizer.encode(text), tokenizer.encode(text)) for _ in range(5))


@pytest.mark.parametrize(
    "content,says",
    [
        (b"no json", "no JSON ("),
        (b"\xff\xfe\x00", "not UTF-8, so no tokenizer.json"),
        (b"[1, 2]", "JSON without a model"),
        (b'{"add_bos_token": true}', "JSON without a model"),
        (b'{"model": {"type": "Unheard"}}', "not a tokenizer that tokenizers"),
        (b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', "has none of <|endoftext|>"),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path, content, says):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(SettingsError) as error:
        FileTokenizer.load(FileTokenizer.Config(path=str(file)), None, builder=False)
    message = str(error.value)
    assert message.startswith(f"tokenizer.path={file}: ") and says in message and "\n" not in message and ";" in message


def test_paths(tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_level(), encoding="utf-8")
    assert FileTokenizer.load(FileTokenizer.Config(path=str(tmp_path)), None, builder=False).vocab_size > 257
    for path in (tmp_path / "nothing.json", tmp_path / "folder"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(SettingsError, match=r"^tokenizer\.path=.*: cannot read .* \(No such file.*; give"):
            FileTokenizer.load(FileTokenizer.Config(path=str(path)), None, builder=False)


def test_text_that_cannot_be_encoded_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a b a b zebra")
    tokenizer = from_file(tmp_path, word_level())
    assert any("does not come back" in note for note in tokenizer.notes())
    with pytest.raises(
        SettingsError, match=r"^tokenizer\.path=.*: cannot encode a text that begins 'a b a b zebra'.*UNK"
    ):
        prepare(tmp_path / "a.txt", tmp_path / "cache", tokenizer=tokenizer)


# Long documents


def cut_up(text, monkeypatch, size=2000) -> list[Piece]:
    monkeypatch.setattr(pieces_module, "PIECE_CHARACTERS", size)
    monkeypatch.setattr(pieces_module, "SEARCH_CHARACTERS", 200)
    return list(text_pieces([text.encode()]))


def test_pieces_give_the_tokens_of_the_whole(any_kind, monkeypatch):
    """Cut at a space between words, with what stands before in sight: as if nothing had been cut."""
    text = prose(30_000)
    pieces = cut_up(text, monkeypatch)
    assert len(pieces) > 15 and "".join(piece.text for piece in pieces) == text
    assert all(piece.text.startswith(" ") and piece.context for piece in pieces[1:])
    whole = any_kind.encode_piece(Piece(text, ""))
    parts = [any_kind.encode_with_bytes(piece) for piece in pieces]
    assert np.array_equal(np.concatenate([ids for ids, _, _ in parts]), whole)
    assert sum(counts.sum() + rest for _, counts, rest in parts) == len(text.encode())
    assert np.array_equal(np.concatenate([any_kind.encode_piece(piece) for piece in pieces]), whole)


@pytest.mark.parametrize("letters", ["x", "日本", "é\n", "😀", "the"])
def test_giant_words_lose_nothing(any_kind, letters, monkeypatch):
    text = letters * (9000 // len(letters))
    pieces = cut_up(text, monkeypatch)
    assert "".join(piece.text for piece in pieces) == text
    parts = [any_kind.encode_with_bytes(piece) for piece in pieces]
    assert sum(counts.sum() + rest for _, counts, rest in parts) == len(text.encode())
    if any_kind.token_bytes() is not None:
        assert any_kind.decode(np.concatenate([ids for ids, _, _ in parts])) == text.encode()


@pytest.mark.parametrize("chunk", [1, 3, 1000, 10_000_000])
def test_pieces_do_not_depend_on_the_chunks(chunk, monkeypatch):
    text = prose(5000)
    data = text.encode()
    expected = cut_up(text, monkeypatch)
    assert list(text_pieces(data[at : at + chunk] for at in range(0, len(data), chunk))) == expected


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "text,offset",
    [
        (b"\xff", 0),
        (b"abc\xff\xfe\x00", 3),
        ("é€".encode() + b"\x80", 5),
        ("ab€".encode()[:-1], 2),
        (b"a\xe2\x82zz", 1),
    ],
)
def test_bytes_that_are_no_utf8_have_an_offset(text, offset, chunk):
    with pytest.raises(NotUtf8) as error:
        list(text_pieces(text[at : at + chunk] for at in range(0, len(text), chunk)))
    assert error.value.offset == offset


def test_no_utf8_names_file_and_offset(tmp_path):
    """A character cut by the border of two reading pieces is whole; what is broken behind it has its place in the
    file."""
    tokenizer = FileTokenizer(byte_level(), label="x")
    good = b"a" * (CHUNK_BYTES - 1) + "€".encode() + b" b" * 5000
    for name, text in (("good", good), ("bad", good + b"\xff" + b"c" * 10)):
        (tmp_path / f"{name}.txt").write_bytes(text)
        (tmp_path / "v.txt").write_bytes(b"validation text")
    splits = prepare(tmp_path / "good.txt", tmp_path / "cache", tmp_path / "v.txt", seq_len=2, tokenizer=tokenizer)
    assert tokenizer.decode(all_tokens(splits.train)) == good
    for val in (None, tmp_path / "v.txt"):  # without one the broken byte lies in the tail, which is read apart
        with pytest.raises(SettingsError) as error:
            prepare(tmp_path / "bad.txt", tmp_path / "cache", val, tokenizer=tokenizer)
        assert f"bad.txt is not UTF-8 at byte {len(good)}; use tokenizer=bytes" in str(error.value)
    prepare(tmp_path / "bad.txt", tmp_path / "cache", tokenizer=ByteTokenizer())


def test_most_documents_are_one_piece():
    assert PIECE_CHARACTERS >= 50_000
    assert list(text_pieces(["é".encode() * 50_000])) == [Piece("é" * 50_000, "")]
    assert list(text_pieces([])) == list(text_pieces([b""])) == []


# What is kept


def test_every_tokenizer_can_be_kept(any_kind, tmp_path):
    path = any_kind.save(tmp_path)
    again = FileTokenizer.from_json(path.read_text(encoding="utf-8"), any_kind.end_of_text)
    text = prose(300).encode()
    assert np.array_equal(again.encode(text), any_kind.encode(text)) and again.fingerprint == any_kind.fingerprint
    assert again.vocab_size == any_kind.vocab_size and again.end_of_text == any_kind.end_of_text


def test_the_byte_tokenizer_as_a_file(tmp_path):
    path = ByteTokenizer().save(tmp_path)
    tokenizer = FileTokenizer.load(FileTokenizer.Config(path=str(path)), None, builder=False)
    text = prose(300).encode()
    assert tokenizer.vocab_size == 257 and tokenizer.end_of_text == 256 and tokenizer.notes() == []
    assert np.array_equal(tokenizer.encode(text), ByteTokenizer().encode(text))
    assert np.array_equal(tokenizer.token_bytes(), ByteTokenizer().token_bytes())
    assert ByteTokenizer.from_json(path.read_text()).fingerprint == ByteTokenizer().fingerprint


def test_the_fingerprint_knows_what_matters():
    spec = json.loads(byte_level())
    base = FileTokenizer(json.dumps(spec), label="a").fingerprint
    assert FileTokenizer(json.dumps(spec, indent=3), label="b").fingerprint == base
    spec["truncation"] = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    assert FileTokenizer(json.dumps(spec), label="a").fingerprint == base  # does not matter here
    assert FileTokenizer(json.dumps(spec), label="a", end_of_text="<|endoftext|>").fingerprint == base
    assert FileTokenizer(json.dumps(spec), label="a", end_of_text="z").fingerprint != base
    ends = {FileTokenizer(kinds()["llama"], label="a", end_of_text=end).fingerprint for end in ("<s>", "</s>")}
    assert len(ends) == 2
    spec["model"]["merges"] = spec["model"]["merges"][:-1]
    assert FileTokenizer(json.dumps(spec), label="a").fingerprint != base
    assert BpeTokenizer.from_json(byte_level()).fingerprint != base


@pytest.mark.parametrize("wrong", [-1, 100_000])
def test_decode_refuses_ids_outside_the_vocabulary(any_kind, wrong):
    with pytest.raises(ValueError, match=str(wrong)):
        any_kind.decode([1, wrong])
