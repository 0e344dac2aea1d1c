"""Kills a training job at random moments until it has finished all the same: `python -m tests.training.soak --kills 100`.

Two ranks of one model under torchrun with restarts, a checkpoint every few steps. Each kill is a SIGKILL of a rank drawn
by lot (torchrun restarts the job), or, each fifth time, of the launcher itself (the same command is started again). It counts
  unreadable   published checkpoints whose index or checksums do not hold at the moment after a kill
  lost         starts that went on from an older checkpoint than the newest that had been published before the kill
  different    steps whose loss, gradient norm or learning rate are not bitwise those of a run that nobody killed,
               and tensors of the last checkpoint
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from parallel_attn.checkpoint import Checkpoint, CheckpointFolder
from parallel_attn.errors import CheckpointError
from tests.command import ROOT, TRAIN, execute, kill_tree
from tests.training.resuming import curve

SETTINGS = (
    "model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "attention.head_dim=8", "attention.num_kv_heads=2",
    "model.mlp.hidden_size=24", "train.seq_len=16", "train.global_batch_size=4", "train.micro_batch_size=2",
    "attention.dropout=0.1", "parallel.tensor=2", "schedule=constant", "schedule.warmup_steps=0", "train.log_every=1",
    "eval.every=0", "checkpoint.every=3", "tracking.wandb.mode=disabled", "tracking.console=lines",
)  # fmt: skip
START_SECONDS = 180.0


class Soak:
    def __init__(self, folder: Path, steps: int, seed: int = 0) -> None:
        self.folder, self.steps, self.draw = folder, steps, random.Random(seed)
        self.kills = self.starts = 0
        self.unreadable: list[str] = []
        self.lost: list[str] = []
        self.log = folder / "log.txt"
        self.run_dir = folder / "killed"

    def command(self, run_dir: Path) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "100000"]
        launcher += ["--monitor-interval", "0.1", str(TRAIN)]
        return [sys.executable, *launcher, *SETTINGS, f"train.steps={self.steps}", f"run_dir={run_dir}"]

    def start(self) -> subprocess.Popen:
        self.starts += 1
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self.command(self.run_dir), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def run(self, kills: int) -> None:
        """Until the job was killed `kills` times and has finished after all; one that finishes before is given more steps."""
        job = self.start()
        try:
            while self.kills < kills:
                # Mostly in training, now and then in the start-up, where the launcher takes its 30 s to end the other rank.
                if self.draw.random() < 0.1:
                    time.sleep(self.draw.uniform(0.0, 8.0))
                elif self._wait_for_progress(job):
                    time.sleep(self.draw.uniform(0.0, 0.8))
                if job.poll() is None:
                    job = self._kill(job)
                else:
                    self._require_success(job)
                    self.steps += 20
                    job = self.start()
            job.wait(START_SECONDS + self.steps)
            self._require_success(job)
        finally:
            kill_tree(job.pid)

    def _require_success(self, job: subprocess.Popen) -> None:
        if job.returncode != 0:
            raise AssertionError(f"exit code {job.returncode}: {self.log.read_text()[-3000:]}")

    def _wait_for_progress(self, job: subprocess.Popen) -> bool:
        """Waits for a step that this start has done; False when the job has finished."""
        before, end = self._size(), time.monotonic() + START_SECONDS
        while self._size() in (before, -1, 0):
            if job.poll() is not None:
                return False
            if time.monotonic() > end:
                raise AssertionError(f"no step within {START_SECONDS:g} s: {self.log.read_text()[-3000:]}")
            time.sleep(0.02)
        return True

    def _size(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.stat().st_size if path.exists() else -1

    def _kill(self, job: subprocess.Popen) -> subprocess.Popen:
        ranks = [child for child in psutil.Process(job.pid).children() if "train.py" in " ".join(child.cmdline())]
        if not ranks or job.poll() is not None:
            return job
        ranks[0].suspend()  # so that nothing is published between the look and the kill
        newest = self._newest()
        self.kills += 1
        if self.kills % 5 == 0:
            job.kill()
            job.wait()
            for rank in ranks:  # half of the time its ranks live on for a moment: the next start has to wait for them
                if self.draw.random() < 0.5:
                    _send(rank, signal.SIGKILL)
            _send(ranks[0], signal.SIGCONT)
        else:
            _send(self.draw.choice(ranks), signal.SIGKILL)
            _send(ranks[0], signal.SIGCONT)
        said = self.log.read_text().count("goes on from")
        self._check_readable()
        if self.kills % 5 == 0:
            job = self.start()
        self._check_lost(job, newest, said)
        return job

    def _newest(self) -> int:
        published = CheckpointFolder(self.run_dir / "checkpoints").published()
        return int(published[-1].name.partition("-")[2]) if published else 0

    def _check_readable(self) -> None:
        for path in CheckpointFolder(self.run_dir / "checkpoints").published():
            try:
                Checkpoint.open(path).verify()
            except CheckpointError as error:
                if path.exists():  # not just let go
                    self.unreadable.append(str(error))

    def _check_lost(self, job: subprocess.Popen, newest: int, said: int) -> None:
        """Reads from the log where the next start went on."""
        end = time.monotonic() + START_SECONDS
        while newest and time.monotonic() < end and job.poll() is None:
            found = re.findall(r"goes on from \S+ at step (\d+)", self.log.read_text())
            if len(found) > said:
                if int(found[-1]) < newest:
                    self.lost.append(f"went on from {found[-1]}, but {newest} was published")
                return
            time.sleep(0.05)

    def different(self) -> list[str]:
        """Compared with a run that nobody kills."""
        whole = self.folder / "whole"
        done = execute(self.command(whole), cwd=ROOT, timeout=START_SECONDS + self.steps)
        assert done.returncode == 0, done.stderr
        got, wanted = curve(self.run_dir), curve(whole)
        found = [f"step {step}" for step in wanted if got.get(step) != wanted[step]]
        last = [CheckpointFolder(path / "checkpoints").newest().index.tensors for path in (self.run_dir, whole)]
        return found + [key for key, entry in last[1].items() if last[0][key] != entry]


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100, help="of the job as it begins; it is given more as it needs them")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, given.steps, given.seed)
    soak.run(given.kills)
    result = {
        "kills": soak.kills,
        "starts by hand": soak.starts,
        "steps": soak.steps,
        "unreadable": soak.unreadable,
        "lost": soak.lost,
        "different": soak.different(),
    }
    print(json.dumps(result, indent=1))
    if soak.unreadable or soak.lost or result["different"]:
        sys.exit(f"see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
