"""The helpers that run commands: they report what happened and leave no process behind."""

import sys
import time

import pytest

from tests.command import LAUNCHER_VARIABLES, CommandTimeout, execute, torchrun
from tests.test_world import wait_until_gone

REPORT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.getcwd(), os.environ["EXTRA"])
print("to stderr", file=sys.stderr)
sys.exit(3 if "fail=true" in sys.argv else 0)
"""
# What torchrun does with its workers: each in a session of its own, where no signal to the parent's group arrives.
PARENT = """
import pathlib, subprocess, time
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path("pid").write_text(str(worker.pid))
print("going to wait", flush=True)
time.sleep(1000)
"""


def test_a_launcher_around_pytest_is_not_handed_on(tmp_path, monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "7")
    show = f"import os; print([name for name in {LAUNCHER_VARIABLES!r} if name in os.environ])"
    assert execute([sys.executable, "-c", show], cwd=tmp_path, timeout=20).stdout == "[]\n"


def test_torchrun_reports(tmp_path):
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    done = torchrun(2, "a=1", "b=two words", cwd=tmp_path, env={"EXTRA": "x"}, script=script)
    assert done.returncode == 0
    for rank in range(2):
        assert f"rank {rank} of 2 ['a=1', 'b=two words'] {tmp_path} x" in done.stdout
    assert done.stderr.count("to stderr") == 2
    failed = torchrun(1, "fail=true", cwd=tmp_path, env={"EXTRA": "x"}, script=script)
    assert failed.returncode != 0 and "rank 0 of 1" in failed.stdout


def test_timeout_kills_workers_in_other_sessions(tmp_path):
    start = time.monotonic()
    with pytest.raises(CommandTimeout, match="going to wait"):
        execute([sys.executable, "-c", PARENT], cwd=tmp_path, timeout=5)
    assert time.monotonic() - start < 20
    assert not wait_until_gone([int((tmp_path / "pid").read_text())])


def test_output_is_not_waited_for(tmp_path):
    """A background process that keeps stdout open does not keep the caller."""
    done = execute(["bash", "-c", "sleep 30 & echo $! > pid; echo started"], cwd=tmp_path, timeout=20)
    assert (done.returncode, done.stdout) == (0, "started\n")
    execute(["kill", (tmp_path / "pid").read_text().strip()], cwd=tmp_path, timeout=5)
