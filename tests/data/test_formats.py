"""Every format that holds text, packed or not: which documents come out, and what is refused with which words."""

import csv
import gzip
import io
import json
import random
import resource

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from parallel_attn.data.corpus import SPLIT_BY_DOCUMENT, SPLIT_BY_FILE, SPLIT_TAIL
from parallel_attn.data.reading import kind
from parallel_attn.errors import SettingsError
from tests.data.helpers import documents, prepare, text_corpus, text_of

TEXTS = ["first", 'two\nlines, "quoted"', "", "crlf\r\nand tab\t", "日本語 😀 é", "last"]
WRITTEN = [text for text in TEXTS if text]


def jsonl(texts, field="text") -> bytes:
    return b"".join(json.dumps({"id": i, field: text}).encode() + b"\n" for i, text in enumerate(texts))


def csv_of(texts) -> bytes:
    handle = io.StringIO(newline="")
    writer = csv.writer(handle)
    writer.writerows([["id", "text"], *enumerate(texts)])
    return handle.getvalue().encode()


def parquet(table: dict, **more) -> bytes:
    handle = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), handle, **more)
    return handle.getvalue()


CONTENT = {
    ".jsonl": jsonl(TEXTS),
    ".json": jsonl(TEXTS),
    ".csv": csv_of(TEXTS),
    ".parquet": parquet({"id": list(range(len(TEXTS))), "text": TEXTS}),
}
PACK = {"": lambda data: data, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("suffix", CONTENT)
def test_records(tmp_path, suffix, packed):
    file = tmp_path / f"a{suffix}{packed}"
    file.write_bytes(PACK[packed](CONTENT[suffix]))
    corpus = text_corpus(file, tmp_path / "cache")
    corpus.check()
    assert [text.decode() for _, text in documents(corpus)] == WRITTEN
    assert corpus.split_rule == SPLIT_BY_DOCUMENT and corpus.nulls == 0


@pytest.mark.parametrize("packed", [".gz", ".zst", ".GZ"])
def test_packed_plain_text_is_one_document(tmp_path, packed):
    text = bytes(range(256)) * 9000  # no UTF-8, more than two pieces
    (tmp_path / f"a.txt{packed}").write_bytes(PACK[packed.lower()](text))
    corpus = text_corpus(tmp_path / f"a.txt{packed}", tmp_path / "cache")
    assert corpus.split_rule == SPLIT_TAIL
    found = documents(corpus)
    assert b"".join(part for _, part in found) == text and [split for split, _ in found] == ["train", "val"]
    assert len(found[1][1]) == pytest.approx(len(text) / 20, abs=3)  # the cut moves to where a character may begin
    assert text_of(prepare(tmp_path / f"a.txt{packed}", tmp_path / "cache")) == text


def test_several_frames_and_members(tmp_path):
    """As `cat a.gz b.gz`, and as parallel compressors write."""
    for packed in (".gz", ".zst"):
        (tmp_path / f"a.txt{packed}").write_bytes(PACK[packed](b"one ") + PACK[packed](b"") + PACK[packed](b"two"))
        corpus = text_corpus(tmp_path / f"a.txt{packed}", tmp_path / "cache")
        assert b"".join(text for _, text in documents(corpus)) == b"one two"


def test_a_mixed_folder(tmp_path):
    for suffix, data in CONTENT.items():
        for packed in PACK:
            (tmp_path / "in" / "deep").mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / "deep" / f"x{suffix}{packed}").write_bytes(PACK[packed](data))
    (tmp_path / "in" / "plain.txt").write_bytes(b"a plain text\n\nas it is")
    (tmp_path / "in" / "README.md").write_bytes(b"not taken")
    corpus = text_corpus(tmp_path / "in", tmp_path / "cache")
    assert len(corpus.files("train")) == 13
    found = documents(corpus)
    assert [text.decode() for _, text in found] == WRITTEN * 12 + ["a plain text\n\nas it is"]
    assert [split for split, _ in found] == ["val" if (i + 1) % 20 == 0 else "train" for i in range(61)]
    assert len(text_corpus(tmp_path / "in/*/*.jsonl*", tmp_path).files("train")) == 3
    splits = prepare(tmp_path / "in", tmp_path / "cache", seq_len=4)
    assert splits.val.count == sum(len(text) + 1 for split, text in found if split == "val")


def test_twenty_files_are_split_by_name(tmp_path):
    for index in range(60):
        (tmp_path / f"{index}.jsonl").write_bytes(jsonl([f"file {index}"] * 3))
    corpus = text_corpus(tmp_path, tmp_path / "cache")
    assert corpus.split_rule == SPLIT_BY_FILE
    held_out = {source.name.split(".")[0] for source in corpus.sources("val")}
    assert {text.decode().split()[1] for split, text in documents(corpus) if split == "val"} == held_out


def test_other_names_are_plain_text(tmp_path):
    assert [kind(name) for name in ("a.md", "a.md.gz", "a.JSONL.ZST", "b.gz", "json")] == [
        "text", "text", "json", "text", "text",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_nested_fields_and_fields_with_a_dot(tmp_path, suffix):
    rows = [{"a": {"b": {"c": "deep"}}, "x.y": "flat"}, {"a": {"b": {"c": "sea"}}, "x.y": "land"}]
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if suffix == ".parquet":
        data = parquet({key: [row[key] for row in rows] for key in rows[0]})
    (tmp_path / f"a{suffix}").write_bytes(data)
    for field, expected in (("a.b.c", [b"deep", b"sea"]), ("x.y", [b"flat", b"land"])):
        corpus = text_corpus(tmp_path / f"a{suffix}", tmp_path, field=field)
        assert [text for _, text in documents(corpus)] == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_null_is_left_out_and_counted(tmp_path, suffix):
    texts = ["one", None, "two", None, None, "three"] * 10
    (tmp_path / f"a{suffix}").write_bytes(jsonl(texts) if suffix == ".jsonl" else parquet({"text": texts}))
    corpus = text_corpus(tmp_path / f"a{suffix}", tmp_path)
    assert len(documents(corpus)) == 30 and corpus.nulls == 30
    lines = []
    prepare(tmp_path / f"a{suffix}", tmp_path / "cache", seq_len=2, progress=lines.append)
    assert any("30 records without text (null) left out" in line for line in lines)


def test_the_field_is_part_of_the_key(tmp_path):
    rows = [json.dumps({"text": f"text {i}", "title": f"title {i}"}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    texts, titles = (
        text_of(prepare(tmp_path / "a.jsonl", tmp_path / "cache", seq_len=2, field=field))
        for field in ("text", "title")
    )
    assert b"text 7" in texts and b"title" not in texts and b"title 7" in titles


def test_bom_blank_lines_and_a_last_line_without_newline(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    (tmp_path / "b.csv").write_bytes(b'\xef\xbb\xbftext,n\r\n\r\nc,1\r\n"d\nd",2')
    corpus = text_corpus([tmp_path / "a.jsonl", tmp_path / "b.csv"], tmp_path)
    assert [text for _, text in documents(corpus)] == [b"a", b"b", b"c", b"d\nd"]


def test_a_long_csv_value(tmp_path):
    text = "a long document, \n" * 20_000
    (tmp_path / "a.csv").write_bytes(csv_of([text, "short"]))
    assert [found.decode() for _, found in documents(text_corpus(tmp_path / "a.csv", tmp_path))] == [text, "short"]


def test_csv_keeps_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text\n\xff\xfe ok\n")
    assert documents(text_corpus(tmp_path / "a.csv", tmp_path)) == [("train", b"\xff\xfe ok")]


def broken(suffix, data, says, field="text"):
    return pytest.param(suffix, data, says, field, id=f"{suffix} {says[:30]}")


GOOD = jsonl(["good"] * 3)
NOISE = random.Random(0).randbytes(300_000)
BROKEN = [
    broken(".jsonl", GOOD + b'{"text": "half', "a.jsonl line 4: no JSON (Unterminated string"),
    broken(".jsonl", b"plain words\n", "a.jsonl line 1: no JSON (Expecting value at character 0)"),
    broken(".jsonl", GOOD + b'["a"]\n', "a.jsonl line 4: a JSON list; each line must be one JSON object"),
    broken(".json", b'{\n  "text": "over lines"\n}\n', "a.json line 1: no JSON ("),
    broken(".jsonl", GOOD + b'{"text": "\xff"}', "a.jsonl line 4: not UTF-8 at byte 10 of the line"),
    broken(".jsonl", b"[" * 100_000, "a.jsonl line 1: no JSON ("),
    broken(".jsonl", b'{"text": "' + b"\\ud83d" + b'"}', "half a surrogate pair (\\ud83d) at character 0 in"),
    broken(".jsonl", GOOD, "data.field=body: not in", "body"),
    broken(".jsonl", GOOD, "a.jsonl line 1; fields there: id, text", "body"),
    broken(".jsonl", GOOD + b'{"other": 1}\n', "a.jsonl line 4; fields there: other"),
    broken(".jsonl", GOOD, "data.field=text.inner: not in", "text.inner"),
    broken(".jsonl", GOOD, "data.field=id: int instead of text in", "id"),
    broken(".csv", b"a,b\n1,2\n", "a.csv line 2; fields there: a, b"),
    broken(".csv", b"text,b\n1,2\n3\n", "a.csv line 3: 1 values, the first row names 2 fields"),
    broken(".csv", b'text\n"open\n', "a.csv line 2: no CSV (unexpected end of data)"),
    broken(".csv", b'text\nok\n"a"b\n', "a.csv line 3: no CSV ("),
    broken(".parquet", b"PAR1 no parquet PAR1", "a.parquet: no Parquet ("),
    broken(".parquet", CONTENT[".parquet"][:-20], "a.parquet: no Parquet ("),
    broken(".parquet", CONTENT[".parquet"], "a.parquet; fields there: id, text", "body"),
    broken(".parquet", parquet({"text": [1, 2]}), "int instead of text in"),
    broken(".parquet", parquet({"a": [{"b": "x"}]}), "data.field=a.c: not in", "a.c"),
    broken(".jsonl.gz", gzip.compress(GOOD * 50)[:-12], "a.jsonl.gz: gz ends too early, in the text behind byte "),
    broken(".txt.gz", gzip.compress(NOISE)[:5000], "a.txt.gz: gz ends too early, in the text behind byte "),
    broken(".txt.gz", b"no gzip at all", "a.txt.gz: gz broken data, Not a gzipped file"),
    broken(
        ".txt.gz", gzip.compress(NOISE)[:3000] + b"x" * 9 + gzip.compress(NOISE)[3009:], "a.txt.gz: gz broken data, "
    ),
    broken(".txt.zst", PACK[".zst"](NOISE)[:-9], "a.txt.zst: zst ends too early, in the text behind byte "),
    broken(".txt.zst", PACK[".zst"](NOISE) + b"tail", "a.txt.zst: zst broken data, "),
    broken(".txt.zst", b"no zstandard at all", "a.txt.zst: zst broken data, "),
    broken(".parquet.gz", gzip.compress(CONTENT[".parquet"])[:-9], "a.parquet.gz: gz ends too early"),
]


@pytest.mark.parametrize("suffix,data,says,field", BROKEN)
def test_broken_files(tmp_path, suffix, data, says, field):
    file = tmp_path / f"a{suffix}"
    file.write_bytes(data)
    with pytest.raises(SettingsError) as error:
        prepare(file, tmp_path / "cache", seq_len=2, field=field)
    message = str(error.value)
    assert says in message and str(file) in message and "\n" not in message and ";" in message
    assert message.startswith(("data.path=", f"data.field={field}: "))
    assert not list((tmp_path / "cache").glob("*.bin*")) and not list((tmp_path / "cache").glob("*.tmp"))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_wrong_field_is_seen_before_any_work(tmp_path, suffix):
    """So that every rank refuses it, not only the one that builds."""
    (tmp_path / f"a{suffix}").write_bytes(CONTENT[suffix])
    with pytest.raises(SettingsError, match=r"^data\.field=body: not in .*; fields there: id, text"):
        text_corpus(tmp_path / f"a{suffix}", tmp_path, field="body").check()
    with pytest.raises(SettingsError, match=r"^data\.field=' ': empty"):
        text_corpus(tmp_path / f"a{suffix}", tmp_path, field=" ").check()


def test_only_empty_records(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["", "", ""]))
    with pytest.raises(SettingsError, match=r"^data\.path=.*a\.jsonl: the training text has 0 tokens"):
        prepare(tmp_path / "a.jsonl", tmp_path / "cache")


def test_too_few_records_for_a_split(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["some words"] * 19))
    with pytest.raises(SettingsError, match=r"the validation text, one document in 20, has 0 tokens.*data\.val_path"):
        prepare(tmp_path / "a.jsonl", tmp_path / "cache")
    (tmp_path / "v.jsonl").write_bytes(jsonl(["words to validate on"]))
    assert prepare(tmp_path / "a.jsonl", tmp_path / "cache", tmp_path / "v.jsonl").train.count == 19 * 11


def test_tail_is_cut_between_characters(tmp_path):
    for size in range(40, 60):
        text = ("é€😀" * 20)[:size].encode()
        (tmp_path / "a.txt").write_bytes(text)
        (tmp_path / "b.txt").write_bytes(b"ascii")
        found = documents(text_corpus(tmp_path / "a.txt", tmp_path))
        assert [split for split, _ in found] == ["train", "val"]
        assert b"".join(part for _, part in found) == text
        assert all(part.decode() for _, part in found)  # neither half breaks a character


def test_tail_over_several_files(tmp_path):
    """The cut goes through the text that holds the last twentieth; what lies behind is validation text, whole."""
    for name, size in (("a", 300), ("b", 0), ("c", 300), ("d", 5), ("e", 5)):
        (tmp_path / f"{name}.txt").write_bytes(name.encode() * size)
    found = documents(text_corpus(tmp_path, tmp_path / "cache"))
    assert found == [
        ("train", b"a" * 300), ("train", b"c" * 280), ("val", b"c" * 20), ("val", b"d" * 5), ("val", b"e" * 5),
    ]  # fmt: skip
    splits = prepare(tmp_path, tmp_path / "cache")
    assert splits.train.read(300, 302).tolist() == [256, ord("c")] and splits.train.count == 300 + 1 + 280
    assert splits.train.read(580, 581).tolist() == [ord("c")]  # the document goes on in the validation text
    assert splits.val.count == 20 + 1 + 5 + 1 + 5 + 1


def test_many_records_in_the_memory_of_a_few(tmp_path):
    """64 MB of them, which gigabytes would not differ from: reading keeps one piece and one line at a time."""
    line = jsonl(["x" * 1000])
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as handle:
        handle.writelines(line * 64 for _ in range(1000))
    corpus = text_corpus(tmp_path / "a.jsonl.gz", tmp_path)
    next(corpus.documents())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(len(chunk) for document in corpus.documents() for chunk in document.chunks)
    assert count == 64_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024
