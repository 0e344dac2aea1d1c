"""The command line as a user types it, for tests: runs train.py in processes of its own and leaves none behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "train.py"
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TAIL = 4000  # characters of output shown with a timeout


class CommandTimeout(AssertionError):
    """A command did not end in time; the message holds the end of what it printed. All its processes were killed."""


def torchrun(
    processes: int,
    *overrides: str,
    cwd: str | Path,
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
    script: str | Path = TRAIN,
) -> subprocess.CompletedProcess:
    """`torchrun --standalone --nproc-per-node PROCESSES train.py OVERRIDES...`, run in folder `cwd`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return execute([*launcher, str(script), *overrides], cwd=cwd, timeout=timeout, env=env)


def python_train(
    *overrides: str, cwd: str | Path, timeout: float = 120.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """`python train.py OVERRIDES...`, run in folder `cwd`."""
    return execute([sys.executable, str(TRAIN), *overrides], cwd=cwd, timeout=timeout, env=env)


def execute(
    command: list[str], *, cwd: str | Path, timeout: float, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Runs `command` in folder `cwd`; returns code, stdout and stderr (text). `env` is added to the environment.

    Raises:
        CommandTimeout: it ran longer than `timeout` seconds.
    """
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES} | (env or {})
    # Files, not pipes: a process that outlives its parent would hold a pipe open and the read would never end.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:  # also when pytest is interrupted
            if process.returncode is None:
                kill_tree(process.pid)
                process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    if late:
        raise CommandTimeout(
            f"not finished after {timeout:g} s: {' '.join(command)}\n--- stdout\n{texts[0][-TAIL:]}\n--- stderr\n{texts[1][-TAIL:]}"
        )
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def kill_tree(pid: int) -> None:
    """Kills a process and all its descendants: torchrun puts its workers in sessions of their own, out of killpg's reach."""
    try:
        root = psutil.Process(pid)
        root.suspend()  # so that it starts nobody while its children are listed
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(family[1:], timeout=10)
