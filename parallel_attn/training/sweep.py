"""Sweeps: Hydra's `-m`, plain or under torchrun, all jobs one after another in the same processes.

The process group is started once and kept: destroying and re-creating it between jobs can hang for ever on gloo.
A job that fails alike on all ranks (settings, data, a loss that is not finite) is named and the others run. If one rank
fails alone, the others may wait for it in a collective: the sweep ends, naming the job, and the same command goes on.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from parallel_attn import mesh as meshes
from parallel_attn.errors import CheckpointError, NonFiniteLoss, PeerLost, SettingsError
from parallel_attn.mesh import Mesh
from parallel_attn.training import exits
from parallel_attn.training.overrides import MULTIRUN_FLAGS, swept
from parallel_attn.training.run_folder import broadcast_text
from parallel_attn.training.signals import Signals

SWEEP_FILE = "sweep.json"
AGREEMENT_SECONDS = 20.0
"""How long a rank whose job failed waits for the others to fail alike."""


@dataclass
class Sweep:
    folder: Path
    mesh: Mesh
    swept_keys: list[str]
    failures: list[tuple[str, Exception]] = field(default_factory=list)
    finished: int = 0

    @classmethod
    def begin(cls, arguments: list[str]) -> Sweep:
        """Starts the process group and agrees on the sweep's folder. Raises SettingsError."""
        overrides = [argument for argument in arguments if argument not in MULTIRUN_FLAGS]
        pairs = swept(overrides)
        given = dict(argument.split("=", 1) for argument in overrides if "=" in argument)
        for key in ("device", "run_dir"):
            if key in [name for name, _ in pairs]:
                raise SettingsError(f"{key} cannot be swept: all jobs of a sweep share it")
        _, local_rank, _ = meshes.launcher_ranks()
        mesh = meshes.start(meshes.choose_device(given.get("device", "auto"), local_rank))
        folder, problem = "", ""
        if mesh.is_main:
            try:
                folder = str(_open_folder(_unquoted(given.get("run_dir")), overrides).resolve())
            except OSError as error:
                problem = f"run_dir={given.get('run_dir', 'runs')}: {error.strerror} ({error.filename})"
            except SettingsError as error:
                problem = str(error)
        folder, problem = broadcast_text(folder, mesh), broadcast_text(problem, mesh)
        if problem:
            raise SettingsError(problem)
        return cls(Path(folder), mesh, [name for name, _ in pairs if name is not None])

    def hydra_overrides(self) -> list[str]:
        escaped = str(self.folder).replace("\\", "\\\\").replace("'", "\\'")
        return [f"hydra.sweep.dir='{escaped}'", "hydra.sweep.subdir=."]

    def run_job(self, raw: DictConfig, *, signals: Signals) -> None:
        """One job of the sweep, in a folder of its own below the sweep's."""
        from hydra.core.hydra_config import HydraConfig

        from parallel_attn.training.pretrain import pretrain

        hydra = HydraConfig.get()
        os.chdir(hydra.runtime.cwd)
        name = folder_name(int(hydra.job.num), list(hydra.overrides.task), self.swept_keys)
        run_dir = self.folder / name
        # Rank 0 looks, all do the same: another node may see its folder late.
        if broadcast_text("done" if self.mesh.is_main and _is_finished(run_dir) else "", self.mesh):
            self.finished += 1
            return self._say(f"sweep job {name}: finished before")
        self._say(f"sweep job {name}")
        OmegaConf.update(raw, "run_dir", str(run_dir))
        try:
            pretrain(
                raw, name=name, restart=True, signals=signals, overrides=list(hydra.overrides.task),
                choices=dict(hydra.runtime.choices),
            )  # fmt: skip
            self.finished += 1
        except (SettingsError, NonFiniteLoss, CheckpointError) as error:
            if not self._all_failed(int(hydra.job.num)):
                exits.leave_with_line(error, f"sweep job {name}, on this rank alone: ")
            self.failures.append((name, error))
            self._say(f"error: sweep job {name}: {error}")
        except PeerLost as error:
            signals.check()
            exits.leave_with_traceback(error, f"sweep job {name}: ")
        except Exception as error:  # of one rank, as far as it can know: the others must not be left waiting
            exits.leave_with_traceback(error, f"sweep job {name}: ")

    def end(self) -> int:
        """Says how it went; returns the exit code."""
        count = self.finished + len(self.failures)
        if self.mesh.is_main:
            _write(self.folder / SWEEP_FILE, _read(self.folder / SWEEP_FILE) | {"complete": not self.failures})
        self._say(f"sweep: {self.finished} of {count} jobs finished, in {self.folder}")
        for name, error in self.failures:
            self._say(f"error: sweep job {name} failed: {error}")
        return exits.exit_code(self.failures[0][1]) if self.failures else 0

    def _all_failed(self, number: int) -> bool:
        """Whether all ranks come to say that this job failed, without a collective that a rank at work would miss."""
        if self.mesh.world.degree == 1:
            return True
        store = dist.distributed_c10d._get_default_store()
        keys = [f"sweep/{number}/{rank}" for rank in range(self.mesh.world.degree)]
        store.set(keys[self.mesh.world.rank], "failed")
        try:
            store.wait(keys, timedelta(seconds=AGREEMENT_SECONDS))
        except (dist.DistStoreError, RuntimeError):  # the time is up: a rank is somewhere else
            return False
        return True

    def _say(self, text: str) -> None:
        if self.mesh.is_main:
            print(text, file=sys.stderr if text.startswith("error") else sys.stdout, flush=True)


def folder_name(number: int, task_overrides: list[str], swept_keys: list[str]) -> str:
    """`<number>-<swept overrides made safe and short>`, such as 3-attention=mqa,seed=2."""
    parts = []
    for override in task_overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+~") in swept_keys:
            parts.append(f"{key.lstrip('+~').rpartition('.')[2]}={value}")
    safe = re.sub(r"[^\w=.,+-]+", "_", ",".join(parts))[:80]
    return f"{number}-{safe}" if safe else str(number)


def _open_folder(run_dir: str | None, overrides: list[str]) -> Path:
    """The folder of this sweep: a given run_dir, an unfinished sweep of the same command, or a new one."""
    mine = {"overrides": overrides, "complete": False}
    if run_dir is not None:
        folder = Path(run_dir).expanduser()
        if (folder / "config.yaml").exists():
            raise SettingsError(f"run_dir={run_dir} holds a single run: a sweep needs another folder")
        if _read(folder / SWEEP_FILE).get("overrides", overrides) != overrides:
            raise SettingsError(f"run_dir={run_dir} holds the sweep of another command: name another folder")
        folder.mkdir(parents=True, exist_ok=True)
    else:
        Path("runs").mkdir(exist_ok=True)
        for old in sorted(Path("runs").glob(f"*/{SWEEP_FILE}"), reverse=True):
            if _read(old) == mine:
                return old.parent
        stem, number = f"{time.strftime('%Y%m%d-%H%M%S')}-sweep", 1
        while True:
            folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
            try:
                folder.mkdir()
                break
            except FileExistsError:
                number += 1
    _write(folder / SWEEP_FILE, mine)
    return folder


def _is_finished(run_dir: Path) -> bool:
    return _read(run_dir / "summary.json").get("status") == "finished"


def _read(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: dict) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _unquoted(value: str | None) -> str | None:
    return None if value in (None, "null") else value.strip("'\"")
