"""Ranks that build, wait, die or stand alone: the cache brings them together, without a collective."""

import multiprocessing
import os
import resource
import signal
import threading
import time

import pytest

from parallel_attn.data import ByteTokenizer, fingerprint
from parallel_attn.data import prepare as prepare_module
from parallel_attn.errors import SettingsError
from tests.data.helpers import prepare, text_of

TEXT = bytes(range(256)) * 8
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["parallel_attn.data"])  # torch is imported once, not in every process


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(TEXT)
    return file


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def build(file, cache, ready, results):
    ready.wait()
    splits = prepare(file, cache)
    results.put((fingerprint(splits), text_of(splits) == TEXT * 500))


def test_builders_at_the_same_time(file, cache):
    file.write_bytes(TEXT * 500)
    ready, results = processes.Barrier(2), processes.Queue()
    workers = [processes.Process(target=build, args=(file, cache, ready, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    assert answers[0] == answers[1] and answers[0][1]
    assert not list(cache.glob("*.tmp"))


class SlowTokenizer(ByteTokenizer):
    """Says that it began, then goes on for ever."""

    def __init__(self, began):
        self.began = began

    def encode_piece(self, piece):
        self.began.set()
        time.sleep(600)


def build_for_ever(file, cache, began):
    prepare(file, cache, tokenizer=SlowTokenizer(began))


def test_a_killed_builder_leaves_nothing_that_counts(file, cache):
    began = processes.Event()
    worker = processes.Process(target=build_for_ever, args=(file, cache, began))
    worker.start()
    assert began.wait(60)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(20)
    assert list(cache.glob("*.tmp"))  # it was in the middle of it
    assert text_of(prepare(file, cache)) == TEXT


def test_others_wait_for_the_builder(file, cache, monkeypatch):
    """Longer than they would wait without a sign of life, and without a collective."""
    monkeypatch.setattr(prepare_module, "TAKEOVER_SECONDS", 5.0)
    monkeypatch.setattr(prepare_module, "SIGN_SECONDS", 0.05)
    monkeypatch.setattr(prepare_module, "REPORT_SECONDS", 0.3)
    file.write_bytes(TEXT * 1500)  # three pieces
    built_by, lines = [], []

    class Slow(ByteTokenizer):
        def pieces(self, chunks):
            built_by.append(threading.current_thread().name)
            return super().pieces(chunks)

        def encode_piece(self, piece):
            time.sleep(2.0)
            return super().encode_piece(piece)

    answers = {}

    def rank(name, builder):
        answers[name] = prepare(file, cache, builder=builder, tokenizer=Slow(), progress=lines.append)

    ranks = [threading.Thread(target=rank, args=(f"rank {r}", r == 0), name=f"rank {r}") for r in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert set(built_by) == {"rank 0"} and len(answers) == 3
    assert answers["rank 1"] == answers["rank 2"] == answers["rank 0"]
    waiting = [line for line in lines if line.startswith("waiting")]
    assert waiting and str(file) in waiting[0] and str(cache) in waiting[0]
    assert any("million bytes done" in line for line in lines)


def test_without_any_builder_one_who_waits_builds(file, cache, monkeypatch):
    """Each rank with a cache folder of its own, as on machines that share no disk."""
    monkeypatch.setattr(prepare_module, "TAKEOVER_SECONDS", 0.3)
    lines = []
    began = time.monotonic()
    splits = prepare(file, cache, builder=False, progress=lines.append)
    assert text_of(splits) == TEXT and time.monotonic() - began >= 0.3
    assert any("no other rank is building" in line and str(cache) in line for line in lines)


def test_waiting_can_be_limited(file, cache):
    with pytest.raises(SettingsError, match=r"^data\.cache_dir=.*waited 0\.2 s .*data\.path="):
        prepare(file, cache, builder=False, wait_seconds=0.2)


def outcomes(path, cache) -> dict:
    """What three ranks get or raise; the two that wait come first."""
    found = {}

    def rank(number):
        time.sleep(0.0 if number else 0.5)
        try:
            found[number] = prepare(path, cache, builder=number == 0)
        except SettingsError as error:
            found[number] = str(error)

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    began = time.monotonic()
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert len(found) == 3 and time.monotonic() - began < 15  # TAKEOVER_SECONDS is 30
    return found


def test_a_failure_of_the_builder_ends_the_waiting(tmp_path, cache):
    """The one who reads the text finds what is wrong with it, and all say so."""
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 50 + "{broken")
    found = outcomes(tmp_path / "a.jsonl", cache)
    assert len(set(found.values())) == 1 and "a.jsonl line 51: no JSON" in found[0]


def test_an_old_failure_is_not_taken_for_a_new_one(file, cache, monkeypatch):
    """The disk was full; now there is room: those who wait must not go by what the last run left."""

    def full(*args, **more):
        raise SettingsError("data.cache_dir=x: no space left on device; make room")

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_tokens", full)
        assert set(outcomes(file, cache).values()) == {"data.cache_dir=x: no space left on device; make room"}
    found = outcomes(file, cache)
    assert found[0] == found[1] == found[2] and text_of(found[0]) == TEXT


def peak_of_encoding(path, cache, results):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    splits = prepare(path, cache)
    results.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, splits.train.count + splits.val.count))


def test_one_giant_line_in_bounded_memory(tmp_path, cache):
    """64 MB without newline or space: peak memory grows by a few pieces, not by the file."""
    giant = tmp_path / "giant.txt"
    with open(giant, "wb") as handle:
        handle.writelines(b"x" * (1 << 20) for _ in range(64))
    results = processes.Queue()
    worker = processes.Process(target=peak_of_encoding, args=(giant, cache, results))
    worker.start()
    grown_kib, count = results.get(timeout=120)
    worker.join(20)
    assert count == 64 * (1 << 20) + 1
    assert grown_kib < 32 * 1024
