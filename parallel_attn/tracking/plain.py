"""Turns settings and metrics into plain values that JSON and W&B can hold."""

import math
from collections.abc import Mapping
from typing import Any

FROM_ENVIRONMENT = "<from the environment>"


def plain_config(config: Any) -> Any:
    """A nested dict/list/number/string copy of a config, for W&B.

    OmegaConf nodes, also inside plain containers, are resolved: W&B would log them as one string. A value taken from an
    environment variable (`${oc.env:...}`, also by way of another key) is replaced by a mark, because such values hold
    secrets; a missing value (`???`) becomes None. Anything that JSON does not know becomes `str(value)`.
    """
    from omegaconf import DictConfig, ListConfig

    if isinstance(config, (DictConfig, ListConfig)):
        config = _resolved(config)
    if isinstance(config, Mapping):
        return {str(key): plain_config(value) for key, value in config.items()}
    if isinstance(config, (list, tuple, set)):
        return [plain_config(value) for value in config]
    if isinstance(config, str) and config == "???":
        return None
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    return str(config)


def _resolved(node: Any) -> Any:
    """An OmegaConf node as plain containers. Marks are set before resolving, so that references lead to the mark."""
    from omegaconf import OmegaConf

    whole = OmegaConf.to_container(node._get_root(), resolve=False, enum_to_str=True)
    marked = OmegaConf.create(_marked(whole))
    path = node._get_full_key(None)
    part = OmegaConf.select(marked, path) if path else marked
    return OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part


def _marked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    return FROM_ENVIRONMENT if isinstance(value, str) and "${oc.env:" in value else value


def plain_number(value: Any) -> int | float | None:
    """A metric as a Python number: 0-dim tensors and numpy scalars are unpacked, integers stay integers.

    NaN and infinities become None: JSON has no word for them, and `NaN` in a line makes strict readers refuse the file.
    """
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def plain_json(value: Any) -> Any:
    """Any nesting of dicts, lists and scalars as JSON values; non-finite numbers become None, unknown types str."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) or hasattr(value, "__float__"):
        return plain_number(value)
    return str(value)
