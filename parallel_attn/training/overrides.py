"""Overrides on the command line: composed once before Hydra does, so that a mistake is one line on one rank."""

from __future__ import annotations

import difflib
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

import parallel_attn
from parallel_attn.errors import SettingsError

MULTIRUN_FLAGS = ("-m", "--multirun")


def config_dir() -> Path:
    """`configs/` of a checkout, or its copy inside an installed package."""
    package = Path(parallel_attn.__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configs/config.yaml beside or inside {package}")


def is_sweep(arguments: list[str]) -> bool:
    return any(argument in MULTIRUN_FLAGS for argument in arguments)


def check_overrides(arguments: list[str]) -> None:
    """Raises SettingsError for what Hydra would refuse, in one line with the choices or the nearest key.

    In a sweep every swept value is tried once, beside the first values of the others.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    for argument in arguments:
        if argument.startswith(("--local-rank", "--local_rank")):
            raise SettingsError(f"{argument}: start with torchrun, which passes the rank in the environment")
    overrides = [argument for argument in arguments if argument not in MULTIRUN_FLAGS]
    if any(argument.startswith("-") for argument in overrides):
        return  # --help, --cfg, ...: Hydra's own
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        try:
            for candidate in _candidates(overrides) if is_sweep(arguments) else [overrides]:
                compose("config", overrides=candidate)
        except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: model=7
            raise SettingsError(explain(error, overrides, _keys(compose("config")))) from error


def compose_checked(overrides: list[str]) -> DictConfig:
    """The configuration that overrides compose, without Hydra's own command line: flags and sweeps are refused.

    Raises SettingsError in one line for what Hydra would refuse.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    for argument in overrides:
        if argument.startswith("-"):
            raise SettingsError(f"{argument}: only KEY=VALUE is taken here")
    try:
        several = [key for key, _ in swept(overrides) if key is not None]
    except HydraException:
        several = []  # told below, with the rest of what cannot be read
    if several:
        raise SettingsError(f"{several[0]}: several values make a sweep, give one (a list in brackets: [1,2])")
    check_overrides(overrides)
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", overrides=overrides)


def _candidates(overrides: list[str]) -> list[list[str]]:
    """Compositions that hold every swept value at least once."""
    choices = [values for _, values in swept(overrides)]
    candidates = [[values[0] for values in choices]]
    for position, values in enumerate(choices):
        candidates += [[*candidates[0][:position], value, *candidates[0][position + 1 :]] for value in values[1:]]
    return candidates


def swept(overrides: list[str]) -> list[tuple[str | None, list[str]]]:
    """For each override (key, its values as single overrides); the key is None for one that is not swept.

    Raises Hydra's OverrideParseException for what it cannot read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    found: list[tuple[str | None, list[str]]] = []
    for text, override in zip(overrides, OverridesParser.create().parse_overrides(overrides)):
        discrete = override.is_sweep_override() and (override.is_choice_sweep() or override.is_range_sweep())
        if not discrete:
            found.append((override.key_or_group if override.is_sweep_override() else None, [text]))
            continue
        key = text.partition("=")[0]
        found.append((override.key_or_group, [f"{key}={value}" for value in override.sweep_string_iterator()]))
    return found


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
            owners = _choices_with(key)
            if owners:
                return f"{argument}: {key} is a key of {' and '.join(owners)}, not of the choice made here"
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            leaf = key.rpartition(".")[2]
            near = near or [name for name in known if name.rpartition(".")[2] == leaf]
            hint = f"did you mean {near[0]}?" if near else "`python train.py --help` lists the keys"
            return f"{argument}: {key} is not a key; {hint}"
    return lines[0]


def _choices_with(key: str) -> list[str]:
    """The choices of a group whose YAML has this key: engine.zero_stage -> engine=deepspeed."""
    group, _, leaf = key.partition(".")
    files = sorted((config_dir() / group).glob("*.yaml")) if leaf else []
    return [f"{group}={file.stem}" for file in files if leaf in _keys(OmegaConf.load(file))]


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
