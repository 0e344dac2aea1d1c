"""metrics.jsonl and summary.json: whole lines, nothing lost, errors that name the path."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from parallel_attn.tracking import JsonlWriter, read_jsonl, write_summary


def test_records_are_on_disk_at_once_and_exact(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    values = {"train/loss": 0.1 + 0.2, "train/lr": 1e-300, "memory/total_peak_bytes": 2**53 + 1}
    writer.write(3, values)
    assert json.loads(path.read_text()) == {"step": 3, **values}  # before close
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(4, {})


def test_non_finite_numbers_are_null(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    text = (tmp_path / "m.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": 1.0,
    }
    writer.close()


@pytest.mark.parametrize(
    "before, kept",
    [
        pytest.param('{"step": 1}\n', [1], id="whole"),
        pytest.param('{"step": 1}\n{"step": 2}', [1, 2], id="newline-lost"),
        pytest.param('{"step": 1}\n{"step": 2, "tr', [1], id="half-line"),
        pytest.param('{"st', [], id="only-half-a-line"),
    ],
)
def test_an_existing_file_is_appended_to(tmp_path, before, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    writer = JsonlWriter(path)
    writer.write(9, {})
    writer.close()
    assert [record["step"] for record in read_jsonl(path)] == [*kept, 9]


def test_kill_leaves_only_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from parallel_attn.tracking import JsonlWriter\n"
        "w = JsonlWriter(sys.argv[1]); s = 0\n"
        "while True: s += 1; w.write(s, {f'train/{i}': i / 7 for i in range(500)})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 200_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    text = path.read_text()
    assert text.endswith("}\n")
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 10


def test_a_full_disk_is_one_error_that_names_the_file():
    writer = JsonlWriter("/dev/full")
    with pytest.raises(OSError, match="/dev/full cannot be written .*free space") as error:
        writer.write(1, {"a": 1.0})
    assert "\n" not in str(error.value)
    writer.close()


def test_a_record_that_fits_only_in_part_is_taken_back(tmp_path):
    # A file-size limit plays the full disk: the kernel takes the first bytes of the line, then refuses.
    path = tmp_path / "metrics.jsonl"
    code = (
        "import resource, signal, sys; from parallel_attn.tracking import JsonlWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "w = JsonlWriter(sys.argv[1])\n"
        "try:\n"
        "    for s in range(1000): w.write(s, {'train/loss': 1.0})\n"
        "except OSError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert str(path) in done.stdout
    text = path.read_text()
    assert text.endswith("}\n") and len(text) < 1000
    assert [record["step"] for record in read_jsonl(path)] == list(range(len(text.splitlines())))


def test_summary_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_summary(path, {"a": 1, "bad": math.nan})
    assert json.loads(path.read_text()) == {"a": 1, "bad": None}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="summary.json cannot be written"):
        write_summary(path, {"a": 2})
    assert json.loads(path.read_text())["a"] == 1
    assert os.listdir(tmp_path) == ["summary.json"]
