"""Tokenising in several processes: the same bytes, errors in one line, and no process that outlives its parent."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from parallel_attn.data import ByteTokenizer, FileTokenizer, encode, fingerprint, pieces
from parallel_attn.data import pool as pool_module
from parallel_attn.data.pool import Pool
from parallel_attn.data.tokenizer import Piece
from parallel_attn.errors import SettingsError
from tests.data.helpers import all_tokens, prepare
from tests.data.odd_tokenizers import Odd
from tests.data.test_text_tokenizers import prose
from tests.data.tokenizer_files import byte_level, kinds

ROOT = Path(__file__).parents[2]


def tokenising(parent=None) -> list[psutil.Process]:
    """The tokenising processes of a process, by default this one."""
    return [
        child for child in psutil.Process(parent).children() if "parallel_attn.data.worker" in " ".join(child.cmdline())
    ]


def test_the_same_bytes_whatever_their_number(tmp_path, monkeypatch):
    """Many short records and one long text, so that tasks of all shapes take turns."""
    monkeypatch.setattr(encode, "TASK_BYTES", 8000)
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 5000)
    folder = tmp_path / "in"
    folder.mkdir()
    rows = (json.dumps({"text": prose(30 + seed % 50, seed)}) for seed in range(800))
    (folder / "a.jsonl").write_text("\n".join(rows))
    (folder / "b.txt").write_text(prose(60_000))
    tokenizer = FileTokenizer(kinds()["llama"], label="x")
    results = []
    for workers in (0, 2):
        splits = prepare(folder, tmp_path / f"cache {workers}", tokenizer=tokenizer, num_workers=workers)
        files = [Path(splits.train.path).read_bytes(), Path(splits.val.bytes_path).read_bytes()]
        results.append((fingerprint(splits), splits.train.count, splits.val.count, files))
    assert results[0] == results[1]
    assert len(all_tokens(splits.val)) > 500 and not tokenising()


def ask(pool, *texts):
    tasks = [[("train", Piece(text, b"")), ("train", None)] for text in texts]
    return [bytes(found.train[:-1].tolist()) for found in pool.map(tasks, waiting=lambda: None)]


def test_workers_that_refuse_and_workers_that_die(monkeypatch):
    ours = pool_module._bare_packages(ByteTokenizer)
    assert ours and not pool_module._bare_packages(Odd)  # a class from elsewhere may need all of the package
    monkeypatch.setattr(pool_module, "_bare_packages", lambda cls: ours)  # this one does not: seconds less
    with Pool(Odd(), 2) as pool:
        assert ask(pool, b"one", b"two", b"three", b"four", b"five") == [b"one", b"two", b"three", b"four", b"five"]
        with pytest.raises(SettingsError, match=r"^tokenizer=odd: will not; use another$"):
            ask(pool, b"refuse")
        for texts, says in (
            ((b"fine", b"die"), "was killed by signal 9 (out of memory?)"),
            ((b"bug",), "ended with code 1"),
        ):
            with pytest.raises(SettingsError) as error:
                ask(pool, *texts)
            message = str(error.value)
            assert message.startswith("data.num_workers=2: a tokenising process ") and says in message
            assert message.endswith("; 0 works in this process")
    assert not tokenising()


def test_text_that_cannot_be_read(tmp_path):
    """Read here, not there: while the processes are at work."""
    (tmp_path / "a.txt").write_bytes(prose(300_000).encode() + b"\xff")
    size = len(prose(300_000).encode())
    with pytest.raises(SettingsError, match=rf"a\.txt is not UTF-8 at byte {size}; use tokenizer=bytes"):
        prepare(tmp_path / "a.txt", tmp_path / "cache", tokenizer=FileTokenizer(byte_level(), label="x"), num_workers=1)
    assert not tokenising()


def test_a_class_that_no_other_process_has(tmp_path):
    class Local(ByteTokenizer):
        pass

    (tmp_path / "a.txt").write_bytes(b"text" * 100)
    with pytest.raises(SettingsError, match=r"^data\.num_workers=1: other processes cannot import .*Local; 0 works"):
        prepare(tmp_path / "a.txt", tmp_path / "cache", tokenizer=Local(), num_workers=1)


def test_a_negative_number(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text" * 100)
    with pytest.raises(
        SettingsError, match=r"^data\.num_workers=-1: must not be negative; 0 tokenises in this process"
    ):
        prepare(tmp_path / "a.txt", tmp_path / "cache", num_workers=-1)


SCRIPT = """
import sys
from tests.data.helpers import prepare
from tests.data.odd_tokenizers import Odd

print("runs", flush=True)
prepare(sys.argv[1] + "/slow.txt", sys.argv[1] + "/cache", tokenizer=Odd(), num_workers=1)
print("done", flush=True)
"""


def test_a_plain_script_and_its_sudden_end(tmp_path):
    """No `if __name__` guard, and yet it runs once; killed, it leaves no process behind, however busy that is."""
    (tmp_path / "slow.txt").write_bytes(b"sleep" * 50)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "marks").mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ODD_MARKS": str(tmp_path / "marks")}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    script = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while len(marks := list((tmp_path / "marks").iterdir())) < 1 and time.monotonic() < until:
            time.sleep(0.05)
        workers = [psutil.Process(int(mark.name)) for mark in marks]
        assert len(workers) == 1 and set(workers) <= set(tokenising(script.pid))
    finally:
        script.kill()
        script.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive and script.stdout.read() == "runs\n"
