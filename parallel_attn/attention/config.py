"""The settings that every attention type has, and their checks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Optional

from parallel_attn.errors import SettingsError
from parallel_attn.nn.rotary import RopeConfig


@dataclass
class AttentionConfig:
    """Each field is a key `attention.<field>`. A type's own Config adds to them."""

    num_heads: int
    head_dim: Optional[int] = None
    v_head_dim: Optional[int] = None
    bias: str = "none"
    output_projection: bool = True
    causal: bool = True
    gate: str = "none"
    qk_norm: str = "none"
    qk_norm_zero_centered: bool = False
    window: Optional[int] = None
    sinks: bool = False
    soft_cap: Optional[float] = None
    dropout: float = 0.0
    rope: RopeConfig = field(default_factory=RopeConfig)


CHOICES = {
    "bias": ("none", "qkv", "all"),
    "gate": ("none", "elementwise", "headwise"),
    "qk_norm": ("none", "head", "full"),
}


def resolved_config(layer: Any, config: AttentionConfig | None, settings: dict) -> AttentionConfig:
    """The layer's Config out of one, or out of its fields as keywords. Raises SettingsError for anything else."""
    kind = type(layer)
    if config is None:
        known = {f.name for f in fields(kind.Config)}
        for key in settings:
            if key not in known:
                raise SettingsError(f"attention.{key} is not a setting of {kind.__name__}: {sorted(known)}")
        return kind.Config(**settings)
    if not isinstance(config, kind.Config):
        raise SettingsError(
            f"{kind.__name__}: config={config!r} is not a {kind.Config.__name__}, give its fields as keywords"
        )
    if settings:
        raise SettingsError(f"{kind.__name__}: give a config or its fields {sorted(settings)}, not both")
    return config


def check_settings(layer: Any) -> None:
    """Raises SettingsError for a value of another type or range, and for what the layer's type cannot honour."""
    config = layer.config
    _check_types(config)
    for key, choices in CHOICES.items():
        check_choice(f"attention.{key}", getattr(config, key), choices)
    if config.window is not None and config.window < 1:
        raise SettingsError(f"attention.window={config.window} must be at least 1 (a token sees itself), or null")
    if config.soft_cap is not None and not 0 < config.soft_cap < math.inf:
        raise SettingsError(f"attention.soft_cap={config.soft_cap} must be positive and finite, or null")
    if not 0 <= config.dropout < 1:
        raise SettingsError(f"attention.dropout={config.dropout} must be in [0, 1)")
    if config.bias == "all" and not config.output_projection:
        raise SettingsError("attention.bias=all with attention.output_projection=false: there is no projection to put it on")
    if config.qk_norm_zero_centered and config.qk_norm == "none" and "qk_norm" not in layer.cannot_honour:
        raise SettingsError("attention.qk_norm_zero_centered=true needs attention.qk_norm=head or full")
    refuse_touched(config, layer.cannot_honour, type(layer).__name__)


def refuse_touched(config: AttentionConfig, reasons: Mapping[str, str], who: str, key: str = "attention") -> None:
    """Raises SettingsError where a setting of `reasons` (its name, or "rope.fraction") is not at its Config's default."""
    for name, reason in reasons.items():
        first, _, leaf = name.partition(".")
        value, default = getattr(config, first), _default(type(config), first)
        if leaf:
            value, default = getattr(value, leaf), getattr(default, leaf)
        if value != default:
            raise SettingsError(f"{key}.{name}={_shown(value)}: {who} {reason}; leave it at {_shown(default)}")


def _default(kind: type, name: str) -> Any:
    made = kind.__dataclass_fields__[name]
    return made.default if made.default_factory is MISSING else made.default_factory()


def _shown(value: Any) -> Any:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else value


def check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{key}={value} is not one of: {', '.join(choices)}")


_TYPES = {
    "int": (lambda value: type(value) is int, "a whole number"),
    "float": (lambda value: isinstance(value, (int, float)) and type(value) is not bool, "a number"),
    "bool": (lambda value: type(value) is bool, "true or false"),
    "str": (lambda value: isinstance(value, str), "a word"),
}


def _check_types(config: AttentionConfig) -> None:
    for setting in fields(config):
        value, declared = getattr(config, setting.name), str(getattr(setting.type, "__name__", setting.type))
        if value is None and "Optional" in declared:
            continue
        for name, (fits, wanted) in _TYPES.items():
            if re.search(rf"\b{name}\b", declared) and not fits(value):
                raise SettingsError(f"attention.{setting.name}={value!r} must be {wanted}")
    if isinstance(config.rope, dict):
        unknown = set(config.rope) - set(RopeConfig.__dataclass_fields__)
        if unknown:
            raise SettingsError(
                f"attention.rope has no {sorted(unknown)}: {', '.join(RopeConfig.__dataclass_fields__)}"
            )
        config.rope = RopeConfig(**config.rope)
    if not isinstance(config.rope, RopeConfig):
        raise SettingsError(
            f"attention.rope={config.rope!r} is not a mapping of {', '.join(RopeConfig.__dataclass_fields__)}"
        )
