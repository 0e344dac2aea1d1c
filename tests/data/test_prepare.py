"""The token cache: reused, rebuilt where broken, and never half."""

import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from parallel_attn.data import ByteTokenizer, StdlibCorpus, fingerprint, prepare_tokens
from parallel_attn.data import prepare as prepare_module
from parallel_attn.data.identity import settle
from parallel_attn.errors import SettingsError
from tests.data.helpers import all_tokens, prepare, text_corpus, text_of

TEXT = bytes(range(256)) * 8


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(TEXT)
    return file


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def entry(cache, suffix):
    (path,) = (path for path in cache.glob(f"*{suffix}") if not path.name.startswith("stat-"))
    return path


def test_entry_says_what_it_is(file, cache):
    splits = prepare(file, cache)
    note = json.loads(entry(cache, ".json").read_text())
    assert text_of(splits) == TEXT
    assert note["count"] == len(TEXT) + 1 == splits.train.count + splits.val.count
    assert note["vocab_size"] == 257 and note["dtype"] == "<u2" and note["source"] == f"data.path={file}"
    assert entry(cache, ".bin").stat().st_size == 2 * note["count"]
    assert not list(cache.glob("*.tmp"))


def test_reused_without_reading_the_text(file, cache, monkeypatch):
    first = prepare(file, cache)
    before = entry(cache, ".bin").stat()

    def never(*args):
        raise AssertionError("the text was read again")

    monkeypatch.setattr(prepare_module, "content_key", never)
    monkeypatch.setattr(prepare_module, "write_tokens", never)
    for builder in (True, False):
        assert prepare(file, cache, builder=builder) == first
    assert entry(cache, ".bin").stat() == before


def test_same_text_elsewhere_is_hashed_and_reused(file, cache, tmp_path, monkeypatch):
    first = prepare(file, cache)
    (tmp_path / "moved").mkdir()
    moved = file.rename(tmp_path / "moved" / "a.txt")
    monkeypatch.setattr(prepare_module, "write_tokens", None)
    assert prepare(moved, cache) == first


@pytest.mark.parametrize("keep_times", [False, True], ids=["new times", "same size and times"])
def test_changed_text_is_a_new_entry(file, cache, keep_times):
    first = prepare(file, cache)
    stat = file.stat()
    file.write_bytes(TEXT[::-1])
    if keep_times:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = prepare(file, cache)
    assert text_of(second) == TEXT[::-1] and text_of(first) == TEXT  # the first run may go on with its own
    assert first.train.path != second.train.path and fingerprint(first) != fingerprint(second)


def test_edits_right_after_one_another_are_seen(file, cache):
    """Quicker than the file system's clock ticks: what is cached must be what is there."""
    for round_ in range(5):
        text = bytes([65 + round_]) * 600
        file.write_bytes(text)
        assert text_of(prepare(file, cache)) == text


def test_young_files_settle_first(file, cache):
    """What the file system's clock cannot tell apart must not be taken for the same."""
    file.write_bytes(b"just now")
    settle(text_corpus(file, cache))
    assert time.time() - file.stat().st_ctime >= 0.05


def test_split_and_tokenizer_are_part_of_the_key(file, cache, tmp_path):
    (tmp_path / "v.txt").write_bytes(b"validation text")
    tail, own = prepare(file, cache), prepare(file, cache, tmp_path / "v.txt")
    assert fingerprint(tail) != fingerprint(own) and own.train.count == len(TEXT) + 1
    other = ByteTokenizer()
    other.fingerprint = "another"
    assert prepare(file, cache, tokenizer=other).train.path != tail.train.path


def test_every_document_ends(tmp_path, cache):
    for name, text in (("b.txt", b"second"), ("a.txt", b"first"), ("c.txt", b"")):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text)
    (tmp_path / "v.txt").write_bytes(b"validation")
    tokens = prepare(tmp_path / "in", cache, tmp_path / "v.txt", seq_len=4).train
    assert all_tokens(tokens).tolist() == [*b"first", 256, *b"second", 256]  # an empty text is no document


def break_bin(cache):
    path = entry(cache, ".bin")
    path.write_bytes(path.read_bytes()[:-3])


def replace_format(path):
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))


BREAKS = {
    "truncated": break_bin,
    "too long": lambda cache: entry(cache, ".bin").write_bytes(entry(cache, ".bin").read_bytes() + b"xx"),
    "bin gone": lambda cache: entry(cache, ".bin").unlink(),
    "json gone": lambda cache: entry(cache, ".json").unlink(),
    "json half": lambda cache: entry(cache, ".json").write_text(entry(cache, ".json").read_text()[:40]),
    "json of another version": lambda cache: replace_format(entry(cache, ".json")),
    "json without fields": lambda cache: entry(cache, ".json").write_text('{"format": 2}'),
    "byte counts truncated": lambda cache: entry(cache, ".bytes").write_bytes(b"xx"),
    "byte counts gone": lambda cache: entry(cache, ".bytes").unlink(),
    "index half": lambda cache: next(cache.glob("stat-*.json")).write_text("{"),
    "index without content": lambda cache: next(cache.glob("stat-*.json")).write_text('{"format": 2}'),
}


@pytest.mark.parametrize("damage", BREAKS.values(), ids=BREAKS)
def test_broken_entries_are_built_again(file, cache, damage):
    first = prepare(file, cache)
    damage(cache)
    with pytest.raises(SettingsError, match=r"^data\.cache_dir=.*waited 0 s"):
        prepare(file, cache, builder=False, wait_seconds=0)  # who does not build must not take it
    assert prepare(file, cache) == first and text_of(first) == TEXT


def test_leftovers_do_not_hurt(file, cache):
    prepare(file, cache)
    names = [entry(cache, ".bin").name, entry(cache, ".json").name]
    for path in list(cache.iterdir()):
        path.unlink()
    young, old = (cache / f"{names[0]}.host-1-{tag}.tmp" for tag in ("aa", "bb"))
    for path in (young, old, cache / f"{names[1]}.host-1-cc.tmp"):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 1e6,) * 2)
    assert text_of(prepare(file, cache)) == TEXT
    assert young.exists() and not old.exists()  # may be in use; surely is not


@pytest.mark.parametrize("builder", [True, False])
def test_cache_folder_that_cannot_be_written(file, tmp_path, builder):
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(
        SettingsError, match=r"^data\.cache_dir=.*taken/cache: cannot write there, Not a directory; give"
    ):
        prepare(file, tmp_path / "taken" / "cache", builder=builder)


def test_full_disk(file, cache):
    """The kernel's own refusal: no file may grow beyond a limit."""
    file.write_bytes(TEXT * 2000)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(SettingsError, match=r"^data\.cache_dir=.*cannot write .*\.bin there, File too large"):
            prepare(file, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(cache.glob("*.bin*"))
    assert text_of(prepare(file, cache)) == TEXT * 2000


@pytest.mark.parametrize("value", ["", " ", "nul\0byte"])
def test_odd_cache_folder(file, value):
    corpus = text_corpus(file, value)
    with pytest.raises(SettingsError, match=r"^data\.cache_dir=.*not a folder"):
        prepare_tokens(corpus, ByteTokenizer(), builder=True, seq_len=8)


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_default_cache_folder(tmp_path, monkeypatch, variable):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_bytes(TEXT)
    corpus = StdlibCorpus(StdlibCorpus.Config(), root=tmp_path / "lib")
    splits = prepare_tokens(corpus, ByteTokenizer(), builder=True, seq_len=4)
    folder = tmp_path if variable == "XDG_CACHE_HOME" else tmp_path / ".cache"
    assert Path(splits.train.path).parent == folder / "parallel_attn" / "tokens"


@pytest.mark.parametrize("change", ["written", "removed"])
def test_files_that_change_while_they_are_read(file, cache, change):
    class Meddler(ByteTokenizer):
        def pieces(self, chunks):
            file.unlink() if change == "removed" else file.write_bytes(b"other")
            return super().pieces(chunks)

    says = "cannot (read|find)" if change == "removed" else "files changed while read"
    with pytest.raises(SettingsError, match=rf"^data\.path=.*{says}"):
        prepare(file, cache, tokenizer=Meddler())
    assert not list(cache.glob("*.bin*"))
