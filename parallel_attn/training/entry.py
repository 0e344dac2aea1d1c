"""From a command line to training jobs: Hydra composes the configuration, errors become one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys

from omegaconf import DictConfig

from parallel_attn import mesh as meshes
from parallel_attn.errors import CheckpointError, Interrupted, NonFiniteLoss, PeerLost, SettingsError
from parallel_attn.training import exits
from parallel_attn.training.overrides import check_overrides, config_dir, is_sweep
from parallel_attn.training.signals import Signals
from parallel_attn.training.sweep import Sweep


def main() -> None:
    """The command line of train.py. Exits with 0, 1 (failed), 2 (settings), 130 (SIGINT), 143 (SIGTERM) or
    138 (SIGUSR1, by which SLURM can warn a job of its end)."""
    try:
        with Signals((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)) as signals:
            run(signals)
    except Interrupted as error:
        exits.leave_interrupted(error)


def run(signals: Signals) -> None:
    """The job or the sweep that the command line asks for."""
    import hydra

    arguments, sweep = sys.argv[1:], None
    try:
        check_overrides(arguments)
        if is_sweep(arguments):
            sweep = Sweep.begin(arguments)
            sys.argv += sweep.hydra_overrides()
    except SettingsError as error:
        exits.leave_with_line(error)
    except Exception as error:  # starting the process group of a sweep
        exits.leave_with_traceback(error)
    job = run_job if sweep is None else sweep.run_job

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def task(raw: DictConfig) -> None:
        job(raw, signals=signals)

    task()
    code = 0 if sweep is None else sweep.end()
    meshes.shutdown()
    if code:
        exits.leave(code)


def run_job(raw: DictConfig, *, signals: Signals) -> None:
    """The one training job of a command; leaves the process on any error."""
    from hydra.core.hydra_config import HydraConfig

    from parallel_attn.training.pretrain import pretrain

    hydra = HydraConfig.get()
    os.chdir(hydra.runtime.cwd)  # paths are relative to where the user stands, whatever hydra.job.chdir says
    try:
        choices = dict(hydra.runtime.choices)
        pretrain(raw, signals=signals, overrides=list(hydra.overrides.task), choices=choices)
    except (SettingsError, NonFiniteLoss, CheckpointError) as error:
        exits.leave_with_line(error)
    except PeerLost as error:
        signals.check()  # the launcher has told this rank to end: it is not the one that has something to say
        exits.leave_with_traceback(error)
    except Exception as error:  # whatever it was, this rank says so in one place and the others are not left waiting
        exits.leave_with_traceback(error)
