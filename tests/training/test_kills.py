"""Signals and kills from outside, through the command line: what was saved is whole, and the same command goes on."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from parallel_attn.checkpoint import newest_in
from tests.command import LAUNCHER_VARIABLES, kill_tree
from tests.training.composed import SMALL
from tests.training.resuming import curve
from tests.training.soak import Soak

# Each step is 40 micro batches of 0.25 s: 10 s, in the middle of which the signal comes.
LONG_STEPS = """
import os, time
from parallel_attn.training.entry import main
from parallel_attn.training.loop import Loop
before = Loop.before_micro_batch
def slow(self, index):
    open("at-" + os.environ["RANK"], "w").write(f"{self.step_now} {index}")
    time.sleep(0.25 if self.step_now == 3 else 0.0)
    return before(self, index)
Loop.before_micro_batch = slow
main()
"""
SETTINGS = (
    "parallel.tensor=2", "train.global_batch_size=40", "train.micro_batch_size=1", "train.seq_len=8", "train.log_every=1",
    "eval.every=0", "checkpoint.every=1000", "tracking.wandb.mode=disabled", "run_dir=a", "data.num_workers=2",
)  # fmt: skip


def family(job: subprocess.Popen) -> list[psutil.Process]:
    launcher = psutil.Process(job.pid)
    return [launcher, *launcher.children(recursive=True)]


def where(folder) -> tuple[int, int]:
    try:
        step, index = (folder / "at-1").read_text().split()
        return int(step), int(index)
    except (OSError, ValueError):
        return -1, -1


@pytest.mark.parametrize(
    "number, to",
    [
        (signal.SIGTERM, "launcher"),
        pytest.param(signal.SIGTERM, "all", marks=pytest.mark.slow),  # as SLURM does
        pytest.param(signal.SIGUSR1, "all", marks=pytest.mark.slow),  # its warning; it ends the launcher at once
        pytest.param(signal.SIGKILL, "launcher", marks=pytest.mark.slow),  # nobody is left to tell the ranks
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_in_the_middle_of_an_accumulation_saves_and_ends_in_time(tmp_path, number, to):
    script = tmp_path / "long_steps.py"
    script.write_text(LONG_STEPS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(
            [*command, *SMALL, *SETTINGS], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + 120
        while not (3, 5) <= where(tmp_path) < (3, 30):
            assert time.monotonic() < end and job.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        members = family(job)
        for member in members if to == "all" else members[:1]:
            member.send_signal(number)
        began = time.monotonic()
        code = job.wait(25)  # not by psutil: who waits first gets the code
        _, alive = psutil.wait_procs(members[1:], timeout=25)
        assert code != 0 and not alive and time.monotonic() - began < 25
    finally:
        kill_tree(job.pid)
    assert where(tmp_path) < (3, 39), "the step was done to its end"
    checkpoint = newest_in(tmp_path / "a")
    assert checkpoint.step == 3 and sorted(curve(tmp_path / "a")) == [1, 2, 3]
    checkpoint.verify()
    said = (tmp_path / "log").read_text()
    name = "SIGTERM" if number == signal.SIGKILL else number.name
    assert re.search(rf"interrupted: {name}", said), said[-3000:]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_five_kills_at_random_moments_lose_nothing(tmp_path):
    soak = Soak(tmp_path, steps=60)
    soak.run(5)
    assert soak.kills == 5 and (soak.unreadable, soak.lost, soak.different()) == ([], [], [])
