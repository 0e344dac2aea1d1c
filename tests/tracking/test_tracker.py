"""The tracker: files, statuses, ranks, resuming, and what a person sees."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from parallel_attn.errors import SettingsError
from parallel_attn.tracking import Tracker, TrackingConfig, WandbConfig, read_jsonl


def tracker(run_dir, *, main=True, console="none", start_step=0, total_steps=100):
    settings = TrackingConfig(wandb=WandbConfig(mode="disabled"), console=console)
    return Tracker(
        run_dir, config={}, settings=settings, total_steps=total_steps, main=main, run_name="r", start_step=start_step
    )


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def test_summary_holds_the_last_value_of_each_metric_and_the_extras(tmp_path):
    with tracker(tmp_path / "new" / "run") as run:
        run.log(10, {"train/loss": torch.tensor(3.0), "memory/total_peak_bytes": 12})
        run.log(20, {"train/loss": 2.0})
        run.log(20, {"val/loss": 2.5})
        run.finish({"layout": {"tensor": 2}, "data_fingerprint": "abc"})
    found = summary(tmp_path / "new" / "run")
    assert found.pop("seconds") >= 0
    assert found == {
        "step": 20,
        "train/loss": 2.0,
        "val/loss": 2.5,
        "memory/total_peak_bytes": 12,
        "layout": {"tensor": 2},
        "data_fingerprint": "abc",
        "status": "finished",
    }
    assert read_jsonl(tmp_path / "new" / "run" / "metrics.jsonl") == [
        {"step": 10, "train/loss": 3.0, "memory/total_peak_bytes": 12},
        {"step": 20, "train/loss": 2.0},
        {"step": 20, "val/loss": 2.5},
    ]


@pytest.mark.parametrize(
    "error, status, line",
    [
        (RuntimeError("boom\nsecond line"), "failed", "RuntimeError: boom"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt: "),
        (SystemExit(3), "failed", "SystemExit: 3"),
        (SystemExit(0), "finished", None),
    ],
    ids=["exception", "ctrl-c", "exit-3", "exit-0"],
)
def test_however_the_run_ends_the_summary_says_so(tmp_path, error, status, line):
    with pytest.raises(type(error)), tracker(tmp_path) as run:
        run.log(1, {"train/loss": 1.5})
        raise error
    found = summary(tmp_path)
    assert (found["status"], found.get("error"), found["train/loss"]) == (status, line, 1.5)


def test_other_ranks_touch_nothing_but_check_the_settings(tmp_path, capsys):
    threads = threading.active_count()
    with tracker(tmp_path / "run", main=False, console="lines") as run:
        run.log(1, {"train/loss": 1.0})
        run.notice("n")
        run.warn("w")
        run.finish({})
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == "" and threading.active_count() == threads
    with pytest.raises(SettingsError, match="tracking.console='x'"):
        tracker(tmp_path / "run", main=False, console="x")


def test_a_resumed_run_appends_and_knows_the_values_before_it(tmp_path):
    with tracker(tmp_path) as run:
        run.log(1, {"memory/total_peak_bytes": 7})
        run.log(20, {"train/loss": 3.0})
        run.log(30, {"val/loss": 99.0})  # after the checkpoint: done again below
    with tracker(tmp_path, start_step=20) as run:
        run.log(40, {"train/loss": 2.0})
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 20, 30, 40]
    found = summary(tmp_path)
    assert (found["memory/total_peak_bytes"], found["train/loss"], found["step"]) == (7, 2.0, 40)
    assert "val/loss" not in found


def test_an_error_in_the_run_is_not_hidden_by_a_full_disk_at_its_end(tmp_path, monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="first"), tracker(tmp_path):

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        raise RuntimeError("first")
    assert "metrics.jsonl cannot be written" in capsys.readouterr().out


def test_lines_notices_and_table(tmp_path, capsys):
    with tracker(tmp_path, console="auto", total_steps=300) as run:  # no terminal here: lines
        values = {"loss": 2.34561, "grad_norm": 0.812, "lr": 1e-3, "tokens_per_second": 12345.4}
        run.log(20, {f"train/{key}": value for key, value in values.items()})
        run.log(20, {"val/loss": 2.5, "val/bits_per_byte": 1.75})
        run.log(30, {"memory/total_peak_bytes": 12})
        run.notice("[notice] with brackets")
        run.warn("careful")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 20/300  loss 2.3456  grad_norm 0.81  lr 1.0e-3  12,345 tok/s  ETA 0:0")
    assert lines[1:4] == [
        "step 20/300  validation  loss 2.5000  bits_per_byte 1.7500",
        "[notice] with brackets",
        "warning: careful",
    ]
    table = "\n".join(lines[4:])
    assert "validation bits per byte" in table and "1.7500" in table and f" {tmp_path} " in table
    assert "\x1b" not in table


def test_console_none_shows_warnings_only(tmp_path, capsys):
    with tracker(tmp_path) as run:
        run.log(1, {"train/loss": 1.0, "val/loss": 1.0})
        run.notice("n")
        run.warn("w")
    assert capsys.readouterr().out == "warning: w\n"


_LOOP = """
import sys
from pathlib import Path
from parallel_attn.tracking import Tracker, TrackingConfig, WandbConfig
settings = TrackingConfig(wandb=WandbConfig(mode="disabled"), console=sys.argv[2])
with Tracker(Path(sys.argv[1]), config={}, settings=settings, total_steps=3000, main=True, run_name="r") as run:
    if sys.argv[3] == "close":
        sys.stdout.close()
    for step in range(1, 3001):
        run.log(step, {"train/loss": 1.0, "train/lr": 1e-3})
    run.notice("the end of \\u00fc")
"""


READERS = ("gone", "close", "closed-at-start", "ascii")


@pytest.mark.parametrize(
    "style, reader",
    [
        *(("lines" if reader == "ascii" else "bar", reader) for reader in READERS),
        *(pytest.param("bar" if reader == "ascii" else "lines", reader, marks=pytest.mark.slow) for reader in READERS),
    ],
)
def test_a_run_lives_on_without_a_reader(tmp_path, style, reader):
    command = [sys.executable, "-c", _LOOP, str(tmp_path), style, reader]
    # Buffered, as users run it: what a failed write leaves in the buffer fails again when Python ends.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if reader == "ascii":
        environment["PYTHONIOENCODING"] = "ascii"
    if reader == "gone":
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=100, env=environment)
        os.close(write)
    elif reader == "closed-at-start":
        closing = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
        done = subprocess.run(closing, stderr=subprocess.PIPE, timeout=100, env=environment)
    else:
        done = subprocess.run(command, capture_output=True, timeout=100, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert summary(tmp_path)["status"] == "finished" and len(read_jsonl(tmp_path / "metrics.jsonl")) == 3000
    if reader == "ascii" and style == "lines":
        assert b"the end of \\xfc" in done.stdout and b"run folder" in done.stdout


def test_bar_on_a_terminal_shows_the_step_and_gives_the_cursor_back(tmp_path):
    import pty

    def on_terminal(**extra):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", _LOOP.replace("3001", "21"), str(tmp_path), "auto", "stay"]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150", **extra}
        process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the other side is closed
                break
            if not piece:
                break
            seen += piece
        os.close(ours)
        assert process.wait() == 0
        return seen.decode()

    seen = on_terminal()
    assert "step 20/3000" in seen and "loss 1.0000" in seen and "ETA" in seen and "run folder" in seen
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1  # cursor hidden once, shown once
    assert "\x1b[3" in seen  # colours
    assert "\x1b[3" not in on_terminal(NO_COLOR="1")
