"""The folder of a run: runs/<date>-<time>-<name> by default, chosen by rank 0 and agreed by all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from parallel_attn.checkpoint import CHECKPOINTS, CheckpointFolder
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import Mesh

CONFIG_FILE = "config.yaml"
LAUNCH_FILE = ".launch"
LOCK_FILE = ".lock"
LOCK_SECONDS = 30.0
"""What a run gives to the processes of an attempt before it (their launcher was killed) to be gone from its folder."""


def launch_id() -> str | None:
    """The torchrun run id of this job, the same after a restart by torchrun; None where there is none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def find_run_dir(run_dir: str | None, plain_config: dict) -> Path | None:
    """The folder that this job goes on in: a fixed run_dir, or that of this launch before torchrun restarted it."""
    if run_dir is not None:
        return Path(run_dir).expanduser()
    return next((old.parent for old in _launches() if _same_launch(old.parent, plain_config)), None)


def _launches() -> list[Path]:
    return sorted(Path("runs").glob(f"*/{LAUNCH_FILE}"))


def check_run_dir(run_dir: str | None, plain_config: dict, resuming: bool) -> None:
    """Raises SettingsError when a fixed run_dir holds a run that cannot go on, or cannot be a run folder. No collective.

    resuming: this job goes on from a checkpoint in it.
    """
    folder = Path("runs" if run_dir is None else run_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"run_dir={folder} is not a folder: name another one")
    holds = run_dir is not None and (folder / CONFIG_FILE).exists() and not resuming
    if holds and not _same_launch(folder, plain_config):
        if CheckpointFolder(folder / CHECKPOINTS).published():
            hint = "leave checkpoint.resume out to go on with it, or name another folder"
            raise SettingsError(f"run_dir={run_dir} already holds a run: {hint}")
        if not _same_settings(folder, plain_config):
            raise SettingsError(f"run_dir={run_dir} already holds a run: name another folder, or remove it")
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise SettingsError(f"run_dir={folder} cannot be written ({parent.resolve()} is read-only for this user)")


def _launch_record(plain_config: dict) -> str:
    """What a restart has in common with the attempt before: torchrun's run id and the settings."""
    return f"{launch_id()} {hashlib.sha256(json.dumps(plain_config, sort_keys=True, default=str).encode()).hexdigest()}"


def _unfinished_record(folder: Path) -> str:
    """The record of a folder whose run was not finished; empty where there is none, or it was."""
    try:
        record = (folder / LAUNCH_FILE).read_text().strip()
    except (OSError, ValueError):
        return ""
    return "" if finished_summary(folder) else record


def finished_summary(folder: Path) -> dict | None:
    """What summary.json says of a finished run; None for one that is not."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and summary.get("status") == "finished" else None


def _same_launch(folder: Path, plain_config: dict) -> bool:
    """Whether a folder holds a broken attempt of this very job. A finished run is never taken over, nor one of other
    settings: a run id can be the same for ever (`--rdzv-id 100`)."""
    return launch_id() is not None and _unfinished_record(folder) == _launch_record(plain_config)


def _same_settings(folder: Path, plain_config: dict) -> bool:
    """Whether a folder holds a broken attempt of the same command, started by hand again."""
    return _unfinished_record(folder).rpartition(" ")[2] == _launch_record(plain_config).rpartition(" ")[2]


@contextmanager
def open_run_dir(run_dir: str | None, name: str, given: dict, mesh: Mesh) -> Iterator[Path]:
    """Makes the folder on rank 0, locks it while the job lasts, and tells all ranks which it is. `given`: the settings of
    the job. Two jobs in one second get two.

    After a restart by torchrun the same launch finds its folder again. Raises SettingsError on every rank.
    """
    folder, problem, lock = "", "", None
    if mesh.is_main:
        try:
            folder = str(_make(run_dir, name, given).resolve())
            lock = _lock(Path(folder))
        except OSError as error:
            problem = f"run_dir={run_dir or 'runs'} cannot be written: {error.strerror} ({error.filename})"
        except SettingsError as error:
            problem = str(error)
    try:
        folder, problem = broadcast_text(folder, mesh), broadcast_text(problem, mesh)
        if problem:
            raise SettingsError(problem)
        yield Path(folder)
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Takes the folder for this process until it ends, however it ends. None where the file system knows no locks."""
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    end, told = time.monotonic() + LOCK_SECONDS, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
            return lock
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode().strip()
            if time.monotonic() > end:
                os.close(lock)
                raise SettingsError(
                    f"run_dir={folder} is in use by another job (process {holder}): end that one, or name another folder"
                ) from None
            if not told:
                print(f"{folder} is still in use by process {holder}: waiting up to {LOCK_SECONDS:.0f} s", flush=True)
                told = True
            time.sleep(0.2)
        except OSError:
            os.close(lock)
            return None


def _make(run_dir: str | None, name: str, given: dict) -> Path:
    old = find_run_dir(run_dir, given)
    if old is not None:
        old.mkdir(parents=True, exist_ok=True)
        return old
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    number = 1
    while True:
        folder = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()  # exclusive: of two jobs in one second one gets the next number
            return folder
        except FileExistsError:
            number += 1


def keep_broken_attempt(folder: Path) -> str | None:
    """Puts the metrics of an attempt that a run does not go on with beside; returns their new name."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return None
    number = len(list(folder.glob("metrics-attempt-*.jsonl"))) + 1
    return metrics.rename(folder / f"metrics-attempt-{number}.jsonl").name


def write_config(folder: Path, given: dict, written: dict) -> None:
    """config.yaml (`written`: the settings with what was derived) and the record of this launch (`given`). Raises OSError."""
    (folder / LAUNCH_FILE).write_text(f"{_launch_record(given)}\n")
    temporary = folder / f".{CONFIG_FILE}.tmp"
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(written)))
    temporary.replace(folder / CONFIG_FILE)


def broadcast_text(text: str, mesh: Mesh) -> str:
    """Broadcast of a short text as bytes."""
    if mesh.world.degree == 1:
        return text
    size = torch.tensor([len(text.encode())], device=mesh.device)
    dist.broadcast(size, 0)
    content = torch.zeros(int(size), dtype=torch.uint8, device=mesh.device)
    if mesh.is_main:
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(mesh.device) if text else content
    if int(size):
        dist.broadcast(content, 0)
    return bytes(content.cpu().tolist()).decode()


def require_same_on_all_ranks(what: str, digest: str, mesh: Mesh) -> None:
    """Raises SettingsError on every rank when a digest (hex) differs between ranks, naming them."""
    if mesh.world.degree == 1:
        return
    mine = torch.tensor([int(digest[:15], 16)], device=mesh.device)
    all_digests = [torch.empty_like(mine) for _ in range(mesh.world.degree)]
    dist.all_gather(all_digests, mine)
    values = [int(value) for value in all_digests]
    different = [rank for rank, value in enumerate(values) if value != values[0]]
    if different:
        raise SettingsError(
            f"{what} on rank{'s' * (len(different) > 1)} {', '.join(map(str, different))} differ from rank 0's: "
            f"all ranks must be started alike and see the same files"
        )
