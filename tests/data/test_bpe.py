"""A BPE trained on the corpus: once, on the training text alone, the same every time."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from parallel_attn.data import BpeTokenizer
from parallel_attn.data import bpe_tokenizer as bpe_module
from parallel_attn.data import prepare as prepare_module
from parallel_attn.errors import SettingsError
from tests.data.helpers import all_tokens, prepare, text_corpus
from tests.data.test_text_tokenizers import UTF8, prose


@pytest.fixture
def file(tmp_path):
    (tmp_path / "a.txt").write_text(prose(20_000))
    return tmp_path / "a.txt"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def load(corpus, vocab_size=300, builder=True, **more) -> BpeTokenizer:
    return BpeTokenizer.load(BpeTokenizer.Config(vocab_size), corpus, builder=builder, **more)


def test_trains_and_comes_back(file, cache):
    tokenizer = load(text_corpus(file, cache))
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.notes()) == (300, 0, [])
    text = file.read_bytes()
    ids = tokenizer.encode(text)
    assert len(ids) < 0.7 * len(text) and tokenizer.decode(ids) == text
    for text in [*UTF8, "never seen: ΩЖ😀".encode(), b"<|endoftext|>"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text and 0 not in tokenizer.encode(text)


def test_trained_once_then_found(file, cache, monkeypatch):
    first = load(text_corpus(file, cache))
    moved = file.rename(file.with_name("b.txt")).rename(file)  # other times, the same content
    monkeypatch.setattr(bpe_module, "_train", None)
    for builder in (True, False):
        assert load(text_corpus(moved, cache), builder=builder).fingerprint == first.fingerprint
    with pytest.raises(TypeError):  # another size would have to be trained
        load(text_corpus(moved, cache), vocab_size=290)


def test_the_same_everywhere(file, cache):
    """In another process, with another number of threads and another order of its hash tables."""
    first = load(text_corpus(file, cache))
    code = (
        "from tests.data.test_bpe import load, text_corpus\n"
        f"print(load(text_corpus({str(file)!r}, {str(cache / 'other')!r})).fingerprint)\n"
    )
    environment = os.environ | {"RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == first.fingerprint, run.stderr


def test_validation_text_is_not_trained_on(tmp_path, cache):
    """The same training text, other validation text: as a file of its own, and as the last twentieth of one."""
    (tmp_path / "t.txt").write_text("ab " * 6334)  # 19,002 bytes
    trained = set()
    for letter in "qz":
        (tmp_path / "v.txt").write_text(letter * 1000)
        (tmp_path / "both.txt").write_text("ab " * 6334 + letter * 1000)
        trained.add(load(text_corpus(tmp_path / "t.txt", cache, tmp_path / "v.txt"), vocab_size=259).to_json())
        trained.add(load(text_corpus(tmp_path / "both.txt", cache), vocab_size=259).to_json())
    assert len(trained) == 1


def test_giant_words_do_not_take_for_ever(tmp_path, cache):
    """A million letters without a space, where the time for a word grows with its square: cut for the training."""
    text = "ab" * 500_000 + " " * 5000 + "日本語" * 5000
    (tmp_path / "a.txt").write_text(text + " end")
    parts = list(bpe_module._training_text(text_corpus(tmp_path / "a.txt", cache), FakePulse()))
    assert "".join(parts).startswith("ab" * 400_000) and max(map(len, parts)) <= 1000 + len(" end")


def test_part_of_a_large_corpus(tmp_path, cache, monkeypatch):
    """Evenly over all of it, not its beginning alone."""
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(f"{name * 8} " * 200)
    monkeypatch.setattr(bpe_module, "TRAINING_BYTES", 4000)  # of 14,400: every fourth piece
    texts = list(bpe_module._training_text(text_corpus(tmp_path, cache), FakePulse()))
    assert [text[0] for text in texts] == ["a", "e"]


class FakePulse:
    def reading(self, verb):
        return lambda size: None


def test_tokens_and_their_bytes(file, cache, tmp_path):
    tokenizer = load(text_corpus(file, cache))
    splits = prepare(file, cache, tokenizer=tokenizer)
    ids = np.concatenate([all_tokens(splits.train), all_tokens(splits.val)])
    assert tokenizer.decode(ids) == file.read_bytes() and ids[-1] == 0
    assert splits.train.dtype == "<u2" and splits.val.vocab_size == 300 and splits.val.end_of_text == 0
    counts = splits.val.read_bytes(0, splits.val.count)
    assert counts.sum() == len(file.read_bytes()) // 20 and counts[-1] == 0


@pytest.mark.parametrize("size,says", [(256, "must be at least 257"), (100_000, r"gives only \d+ tokens; \d+ works")])
def test_sizes_that_do_not_work(file, cache, size, says):
    with pytest.raises(SettingsError, match=rf"^tokenizer\.vocab_size={size}: .*{says}") as error:
        load(text_corpus(file, cache), vocab_size=size)
    if size > 1000:
        works = int(str(error.value).split(" works")[0].split()[-1])
        assert load(text_corpus(file, cache), vocab_size=works).vocab_size == works


def test_text_that_is_no_utf8(tmp_path, cache):
    (tmp_path / "a.txt").write_bytes(b"good text " * 50 + b"\xff" + b" more text" * 50)
    with pytest.raises(SettingsError, match=r"^data\.path=.*a\.txt is not UTF-8 at byte 500; use tokenizer=bytes"):
        load(text_corpus(tmp_path / "a.txt", cache))


def test_the_others_wait_for_the_one_that_trains(file, cache, monkeypatch):
    monkeypatch.setattr(prepare_module, "TAKEOVER_SECONDS", 1.0)
    monkeypatch.setattr(prepare_module, "SIGN_SECONDS", 0.05)
    real, trained_by, found = bpe_module._train, [], {}

    def slow(corpus, size, pulse):
        trained_by.append(threading.current_thread().name)
        with pulse.alive():
            time.sleep(2.5)  # longer than the others would wait without a sign of life
        return real(corpus, size, pulse)

    monkeypatch.setattr(bpe_module, "_train", slow)

    def rank(number):
        found[number] = load(text_corpus(file, cache), builder=number == 0).fingerprint

    ranks = [threading.Thread(target=rank, args=(number,), name=f"rank {number}") for number in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert trained_by == ["rank 0"] and len(found) == 3 and len(set(found.values())) == 1


def test_a_failure_of_the_builder_reaches_the_others(tmp_path, cache):
    """Within a moment, and in the same words: nobody waits for what will not come."""
    (tmp_path / "a.txt").write_bytes(b"good text " * 50 + b"\xff" + b" more text" * 50)
    failures = {}

    def rank(number):
        if number == 0:
            time.sleep(0.5)
        try:
            load(text_corpus(tmp_path / "a.txt", cache), builder=number == 0)
        except SettingsError as error:
            failures[number] = str(error)

    began = time.monotonic()
    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert len(failures) == 3 and len(set(failures.values())) == 1 and "not UTF-8 at byte 500" in failures[0]
    assert time.monotonic() - began < 15  # and not after TAKEOVER_SECONDS
    (tmp_path / "a.txt").write_bytes(b"good text " * 400)  # the old failure does not count for the new text
    assert load(text_corpus(tmp_path / "a.txt", cache), vocab_size=262).vocab_size == 262
