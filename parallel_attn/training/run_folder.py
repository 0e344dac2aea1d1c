"""The folder of a run: runs/<date>-<time>-<name> by default, chosen by rank 0 and agreed by all."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from parallel_attn.errors import SettingsError
from parallel_attn.mesh import Mesh

CONFIG_FILE = "config.yaml"
LAUNCH_FILE = ".launch"


def launch_id() -> str | None:
    """The torchrun run id of this job, the same after a restart by torchrun; None where there is none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def check_run_dir(run_dir: str | None, plain_config: dict) -> None:
    """Raises SettingsError when a fixed run_dir already holds a run of another launch, or cannot be one. No collective."""
    folder = Path("runs" if run_dir is None else run_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"run_dir={folder} is not a folder: name another one")
    if run_dir is not None and (folder / CONFIG_FILE).exists() and not _same_launch(folder, plain_config):
        raise SettingsError(f"run_dir={run_dir} already holds a run: name another folder, or remove it")
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise SettingsError(f"run_dir={folder} cannot be written ({parent.resolve()} is read-only for this user)")


def _launch_record(plain_config: dict) -> str:
    """What a restart has in common with the attempt before: torchrun's run id and the settings."""
    return f"{launch_id()} {hashlib.sha256(json.dumps(plain_config, sort_keys=True, default=str).encode()).hexdigest()}"


def _same_launch(folder: Path, plain_config: dict) -> bool:
    """Whether a folder holds a broken attempt of this very job. A finished run is never taken over, nor one of other
    settings: a run id can be the same for ever (`--rdzv-id 100`)."""
    if launch_id() is None:
        return False
    try:
        record = (folder / LAUNCH_FILE).read_text().strip()
        summary = folder / "summary.json"
        finished = summary.exists() and json.loads(summary.read_text()).get("status") == "finished"
    except (OSError, ValueError):
        return False
    return record == _launch_record(plain_config) and not finished


def open_run_dir(run_dir: str | None, name: str, given: dict, written: dict, mesh: Mesh) -> Path:
    """Makes the folder on rank 0, writes config.yaml, and tells all ranks which it is. `given`: the settings of the job,
    `written`: the same with what was derived. Two jobs in one second get two.

    After a restart by torchrun the same launch finds its folder again; the metrics of the broken attempt are kept beside.
    """
    folder, problem = "", ""
    if mesh.is_main:
        try:
            folder = str(_make(run_dir, name, given).resolve())
            _write_config(Path(folder), given, written)
        except OSError as error:
            problem = f"run_dir={run_dir or 'runs'} cannot be written: {error.strerror} ({error.filename})"
    folder, problem = broadcast_text(folder, mesh), broadcast_text(problem, mesh)
    if problem:
        raise SettingsError(problem)
    return Path(folder)


def _make(run_dir: str | None, name: str, given: dict) -> Path:
    if run_dir is not None:
        folder = Path(run_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        _keep_broken_attempt(folder)
        return folder
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    for old in runs.glob(f"*/{LAUNCH_FILE}"):
        if _same_launch(old.parent, given):
            _keep_broken_attempt(old.parent)
            return old.parent
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    number = 1
    while True:
        folder = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()  # exclusive: of two jobs in one second one gets the next number
            return folder
        except FileExistsError:
            number += 1


def _keep_broken_attempt(folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        number = len(list(folder.glob("metrics-attempt-*.jsonl"))) + 1
        metrics.rename(folder / f"metrics-attempt-{number}.jsonl")


def _write_config(folder: Path, given: dict, written: dict) -> None:
    if launch_id() is not None:
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
