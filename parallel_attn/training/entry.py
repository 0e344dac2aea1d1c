"""From a command line to a training job: Hydra composes the configuration, errors become one line and an exit code."""

from __future__ import annotations

import difflib
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf

import parallel_attn
from parallel_attn import mesh as meshes
from parallel_attn.errors import NonFiniteLoss, PeerLost, SettingsError

SETTINGS_EXIT, FAILED_EXIT, INTERRUPTED_EXIT = 2, 1, 130
GRACE_SECONDS = 2.0
"""How long the other ranks let local rank 0 speak first; the launcher ends them meanwhile."""


def config_dir() -> Path:
    """`configs/` of a checkout, or its copy inside an installed package."""
    package = Path(parallel_attn.__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configs/config.yaml beside or inside {package}")


def main() -> None:
    """The command line of train.py. Exits with 0, 1 (failed), 2 (settings) or 130 (interrupted)."""
    import hydra

    refuse_bad_overrides(sys.argv[1:])
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(job)()
    meshes.shutdown()


def job(raw: DictConfig) -> None:
    """One training job; leaves the process on any error."""
    from hydra.core.hydra_config import HydraConfig

    from parallel_attn.training.pretrain import pretrain

    choices = HydraConfig.get().runtime.choices
    try:
        pretrain(raw, name=f"{choices.get('model')}-{choices.get('attention')}")
    except (SettingsError, NonFiniteLoss) as error:
        leave_with_line(error)
    except KeyboardInterrupt:
        leave(INTERRUPTED_EXIT)
    except Exception as error:  # whatever it was, this rank says so in one place and the others are not left waiting
        leave_with_traceback(error)


def leave_with_line(error: Exception) -> NoReturn:
    """For an error that all ranks share: local rank 0 prints one line. Another rank, if it is still there after a while,
    was alone with it and prints it too."""
    rank, local_rank, _ = meshes.launcher_ranks()
    if local_rank != 0:
        time.sleep(GRACE_SECONDS)
    _record(error)
    where = f" (rank {rank})" if local_rank != 0 else ""
    print(f"error{where}: {error}", file=sys.stderr, flush=True)
    leave(SETTINGS_EXIT if isinstance(error, SettingsError) else FAILED_EXIT)


def leave_with_traceback(error: Exception) -> NoReturn:
    rank = meshes.launcher_ranks()[0]
    if isinstance(error, PeerLost):
        # The launcher ends this rank while it waits; what it has to say is no cause.
        time.sleep(5 * GRACE_SECONDS)
        print(f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        leave(FAILED_EXIT)
    _record(error)
    text = "".join(traceback.format_exception(error))
    print(f"error on rank {rank}:\n{text}", file=sys.stderr, flush=True)
    leave(FAILED_EXIT)


def _record(error: Exception) -> None:
    """Leaves the cause where torchrun looks for it, so that its own summary names it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def leave(code: int) -> NoReturn:
    """Ends the process without the barrier of a clean shutdown: the peers may not come."""
    sys.stdout.flush()
    sys.exit(code)


def refuse_bad_overrides(arguments: list[str]) -> None:
    """Composes once before Hydra does, so that a misspelt key or choice ends in one line on one rank."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    for argument in arguments:
        if argument.startswith(("--local-rank", "--local_rank")):
            leave_with_line(SettingsError(f"{argument}: start with torchrun, which passes the rank in the environment"))
    if any(argument.startswith("-") for argument in arguments):
        return  # --help, -m, ...: Hydra's own
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        try:
            compose("config", overrides=list(arguments))
        except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: model=7
            known = _keys(compose("config"))
            leave_with_line(SettingsError(explain(error, arguments, known)))


def explain(error: Exception, arguments: list[str], known: list[str]) -> str:
    """Hydra's several lines in one, with the choices or the nearest key."""
    from hydra.errors import MissingConfigException, OverrideParseException

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={choice} is not one of: {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read ({lines[0]}); quote a value with special characters: key=\"'a=b'\""
    for argument in arguments:
        key = argument.partition("=")[0].lstrip("+~")
        if key and f"'{key}'" in lines[0]:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            leaf = key.rpartition(".")[2]
            near = near or [name for name in known if name.rpartition(".")[2] == leaf]
            hint = f"did you mean {near[0]}?" if near else "`python train.py --help` lists the keys"
            return f"{argument}: {key} is not a key; {hint}"
    return lines[0]


def _keys(config: DictConfig) -> list[str]:
    found: list[str] = []

    def walk(prefix: str, node) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            found.append(name)
            if isinstance(value, dict):
                walk(f"{name}.", value)

    walk("", OmegaConf.to_container(config, resolve=False))
    return found
