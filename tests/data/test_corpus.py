"""Which files a corpus takes, how it splits them, and what it refuses with which words."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from parallel_attn.data import StdlibCorpus, TextCorpus
from parallel_attn.data.corpus import SPLIT_BY_FILE, SPLIT_GIVEN, SPLIT_TAIL
from parallel_attn.errors import SettingsError
from tests.data.helpers import as_plain_user, prepare, text_corpus


def refused(path, tmp_path, val_path=None, match=None):
    with pytest.raises(SettingsError, match=match) as error:
        text_corpus(path, tmp_path / "cache", val_path).check()
    message = str(error.value)
    assert (
        message.startswith("data.") and "\n" not in message and ";" in message
    )  # one line: key, value, what would work
    return message


@pytest.fixture
def tree(tmp_path):
    """a.txt, deep/b.txt, deep/er/C.TXT, notes.md, plus[1]/d.txt."""
    for name in ("a.txt", "deep/b.txt", "deep/er/C.TXT", "notes.md", "plus[1]/d.txt", "plus1/e.txt"):
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text of {name}")
    return tmp_path / "tree"


def names(corpus, split="train"):
    return [source.name for source in corpus.sources(split)]


def test_folder_gives_all_txt_sorted(tree, tmp_path):
    corpus = text_corpus(tree, tmp_path)
    corpus.check()
    assert names(corpus) == ["a.txt", "deep/b.txt", "deep/er/C.TXT", "plus1/e.txt", "plus[1]/d.txt"]


def test_a_file_of_any_name(tree, tmp_path):
    assert text_corpus(tree / "notes.md", tmp_path).files("train") == [tree / "notes.md"]


@pytest.mark.parametrize(
    "pattern,expected",
    [
        ("*.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "deep/b.txt", "plus1/e.txt", "plus[1]/d.txt"]),
        ("*", ["a.txt", "deep/b.txt", "deep/er/C.TXT", "plus1/e.txt", "plus[1]/d.txt"]),
        ("d??p/b.txt", ["deep/b.txt"]),
        ("plus[1]", ["d.txt"]),  # exists as written
        ("plus[1]/d.txt", ["d.txt"]),
        ("plus[12]/*.txt", ["plus1/e.txt"]),
    ],
)
def test_globs_and_literal_names(tree, tmp_path, pattern, expected):
    assert names(text_corpus(tree / pattern, tmp_path)) == expected


def test_lists_keep_their_order_and_take_a_file_once(tree, tmp_path):
    corpus = text_corpus([tree / "notes.md", tree / "deep/b.txt", tree, tree / "a.txt"], tmp_path)
    assert names(corpus) == [
        "notes.md",
        ["deep", "b.txt"][1],
        "a.txt",
        "deep/er/C.TXT",
        "plus1/e.txt",
        "plus[1]/d.txt",
    ]


def test_relative_paths_and_home(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tree)
    monkeypatch.setenv("HOME", str(tree / "deep"))
    assert names(text_corpus("a.txt", tmp_path)) == ["a.txt"]
    assert names(text_corpus("*.txt", tmp_path)) == ["a.txt"]
    assert names(text_corpus("~/b.txt", tmp_path)) == ["b.txt"]


def test_links(tree, tmp_path):
    (tree / "deep" / "loop").symlink_to(tree)
    (tree / "gone.txt").symlink_to(tree / "nothing")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "o.txt").write_text("o")
    (tree / "linked").symlink_to(outside)
    assert names(text_corpus(tree, tmp_path)) == [
        "a.txt", "deep/b.txt", "deep/er/C.TXT", "linked/o.txt", "plus1/e.txt", "plus[1]/d.txt",
    ]  # fmt: skip


def test_tail_split_of_few_files(tree, tmp_path):
    corpus = text_corpus(tree, tmp_path)
    assert corpus.split_rule == SPLIT_TAIL and corpus.files("val") == []


def test_split_by_file(tmp_path):
    for index in range(60):
        (tmp_path / f"{index}.txt").write_text("text")
    corpus = text_corpus(tmp_path, tmp_path / "cache")
    expected = {f"{i}.txt" for i in range(60) if int(hashlib.sha256(f"{i}.txt".encode()).hexdigest(), 16) % 20 == 0}
    assert corpus.split_rule == SPLIT_BY_FILE and expected
    assert set(names(corpus, "val")) == expected
    assert set(names(corpus)) == {f"{i}.txt" for i in range(60)} - expected


def test_many_files_of_which_none_is_held_out(tmp_path):
    held_out = {i for i in range(100) if int(hashlib.sha256(f"{i}.txt".encode()).hexdigest(), 16) % 20 == 0}
    for index in sorted(set(range(100)) - held_out)[:25]:
        (tmp_path / f"{index}.txt").write_text("text")
    assert text_corpus(tmp_path, tmp_path / "cache").split_rule == SPLIT_TAIL


def test_val_path_is_not_trained_on(tree, tmp_path):
    corpus = text_corpus(tree, tmp_path, tree / "deep")
    assert corpus.split_rule == SPLIT_GIVEN
    assert names(corpus) == ["a.txt", "plus1/e.txt", "plus[1]/d.txt"] and names(corpus, "val") == ["b.txt", "er/C.TXT"]
    refused(
        tree / "a.txt", tmp_path, tree / "a.txt", match=r"data\.path=.*a\.txt: every file is also in data\.val_path="
    )


@pytest.mark.parametrize("key", ["path", "val_path"])
@pytest.mark.parametrize(
    "make,says",
    [
        (lambda folder: "nowhere.txt", "no such file or folder"),
        (lambda folder: "nowhere/*.txt", "matches nothing"),
        (lambda folder: "[abc", "matches nothing"),
        (lambda folder: "empty.txt", "0 bytes"),
        (lambda folder: "hollow", "no text file in this folder"),
        (lambda folder: "hollow/*", "matches 1 names, no text file among them"),
        (lambda folder: "broken.txt", "No such file"),
        (lambda folder: "pipe", "neither a file nor a folder"),
        (lambda folder: "empty.txt/more", "no such file or folder"),
        (lambda folder: "x" * 300, "File name too long"),
        (lambda folder: "nul\0byte", "null"),
        (lambda folder: " ", "no path given"),
    ],
)
def test_bad_paths(tmp_path, monkeypatch, key, make, says):
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text("good")
    Path("empty.txt").write_text("")
    Path("hollow").mkdir()
    Path("hollow/picture.png").write_text("png")
    Path("broken.txt").symlink_to("nothing")
    os.mkfifo("pipe")
    bad = make(tmp_path)
    message = refused(*((bad, tmp_path) if key == "path" else ("good.txt", tmp_path, bad)))
    assert says in message and message.startswith(f"data.{key}=")
    assert bad[:190] in message or repr(bad) in message


@pytest.mark.parametrize("value", [None, 5, [], ["a.txt", 3], b"a.txt", "???", [""], {"a": "b"}])
def test_values_that_are_no_path(tmp_path, value):
    corpus = TextCorpus(TextCorpus.Config(path=value, cache_dir=str(tmp_path)))
    with pytest.raises(SettingsError, match=r"^data\.path=.*(not a path|no path given); give"):
        corpus.check()


def test_a_missing_file_in_a_list_is_named_alone(tree, tmp_path):
    assert refused([tree / "a.txt", tree / "b.txt"], tmp_path).startswith(f"data.path={tree / 'b.txt'}: no such")


def test_list_of_only_empty_files(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    refused([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path, match="2 files with 0 bytes")
    (tmp_path / "b.txt").write_text("x")
    text_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path).check()


@pytest.fixture
def open_folder():
    """A folder that any user may enter; pytest's own is closed to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "closed,mode,path",
    [
        ("a.txt", 0, "a.txt"),
        ("a.txt", 0, "."),
        ("a.txt", 0, "*.txt"),
        ("deep", 0, "deep"),
        ("deep", 0, "deep/b.txt"),
        ("deep", 0, "."),
        ("deep", 0, "deep/*.txt"),
        ("deep", 0o311, "deep/*.txt"),  # may be entered, not listed: glob by itself says "nothing there"
        ("deep", 0o644, "deep"),  # may be listed, not entered
    ],
)
def test_unreadable(open_folder, closed, mode, path):
    (open_folder / "a.txt").write_text("text")
    (open_folder / "deep").mkdir()
    (open_folder / "deep" / "b.txt").write_text("text")
    corpus = text_corpus(open_folder / path, open_folder)
    as_plain_user(corpus.check)  # well, as long as it may be read
    (open_folder / closed).chmod(mode)
    with pytest.raises(SettingsError) as error:
        as_plain_user(text_corpus(open_folder / path, open_folder).check)
    message = str(error.value)
    assert message.startswith("data.path=") and "Permission denied" in message and str(open_folder / closed) in message


def test_stdlib(tmp_path):
    corpus = StdlibCorpus(StdlibCorpus.Config())
    corpus.check()
    train, val = names(corpus), names(corpus, "val")
    assert "argparse.py" in train + val and "json/decoder.py" in train + val
    assert train == sorted(train) and not set(train) & set(val)
    size = sum(path.stat().st_size for split in ("train", "val") for path in corpus.files(split))
    assert 5e6 < size < 30e6 and len(val) > 10
    for name in train + val:
        parts = name.split("/")[:-1]
        assert name.endswith(".py") and not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & set(
            parts
        )
        assert not name.startswith(("_sysconfigdata", "config-"))


def test_stdlib_leaves_out(tmp_path):
    kept = ["abc.py", "pkg/testing.py"]
    left = ["test/a.py", "pkg/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py", "dist-packages/e.py"]
    left += ["__pycache__/f.py", "config-3.12-x/g.py", "_sysconfigdata__linux.py", "data.txt"]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    assert names(StdlibCorpus(StdlibCorpus.Config(), root=tmp_path)) == kept


def test_stdlib_without_sources(tmp_path):
    with pytest.raises(SettingsError, match=r"^data=stdlib: no Python source in .*data=text"):
        StdlibCorpus(StdlibCorpus.Config(), root=tmp_path).check()
    with pytest.raises(SettingsError, match=r"^data=stdlib: cannot list .*data=text"):
        StdlibCorpus(StdlibCorpus.Config(), root=tmp_path / "nowhere").check()


S = 8


@pytest.mark.parametrize("count", [S - 1, S, S + 1, S + 2])
@pytest.mark.parametrize("short", ["train", "val"])
def test_texts_about_one_sample_long(tmp_path, count, short):
    """A file of n bytes is n + 1 tokens."""
    (tmp_path / "short.txt").write_bytes(b"x" * (count - 1))
    (tmp_path / "long.txt").write_bytes(b"y" * 50)
    paths = ["short.txt", "long.txt"] if short == "train" else ["long.txt", "short.txt"]
    path, val_path = (tmp_path / name for name in paths)
    if count > S:
        splits = prepare(path, tmp_path / "cache", val_path, seq_len=S)
        assert getattr(splits, short).count == count
        return
    with pytest.raises(SettingsError) as error:
        prepare(path, tmp_path / "cache", val_path, seq_len=S)
    key = "path" if short == "train" else "val_path"
    message = str(error.value)
    assert message.startswith(f"data.{key}={tmp_path / 'short.txt'}: ") and f"has {count} tokens" in message
    assert f"takes {S + 1} (train.seq_len={S} " in message


def test_short_tail(tmp_path):
    """One file: its last 5 % must hold a sample too."""
    file = tmp_path / "a.txt"
    for size, works in ((20 * S - 1, False), (20 * S, True)):
        file.write_bytes(b"x" * size)
        if works:
            splits = prepare(file, tmp_path / "cache", seq_len=S)
            assert (splits.train.count, splits.val.count) == (19 * S, S + 1)  # 5 % of the bytes, and the end of text
        else:
            with pytest.raises(
                SettingsError, match=rf"the validation text, the last 5 % of the text, has {S} tokens.*data.val_path"
            ):
                prepare(file, tmp_path / "cache", seq_len=S)


def test_ten_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ten bytes!")
    with pytest.raises(SettingsError, match=r"data\.path=.*a\.txt.* has 11 tokens, one sample takes 129"):
        prepare(tmp_path / "a.txt", tmp_path / "cache", seq_len=128)
    with pytest.raises(SettingsError, match=r"train\.seq_len=0"):
        prepare(tmp_path / "a.txt", tmp_path / "cache", seq_len=0)
