"""Rotary settings between our `attention.rope` and transformers' keys.

transformers 5 keeps them all in `rope_parameters`; before, `rope_theta` and `partial_rotary_factor` stood at the top
and `rope_scaling` held the rest. Both are read (a key that stands in two places must say the same in both) and written.
"""

from __future__ import annotations

from typing import Any

from parallel_attn.errors import SettingsError
from parallel_attn.interop.config_json import ConfigJson, number, shown
from parallel_attn.nn import RopeConfig, RopeScaling

DEFAULT_THETA = 10000.0
_NUMBERS = ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
_MULTIPLIERS = ("mscale", "mscale_all_dim", "attention_factor")


def read_rope(
    config: ConfigJson, *, style: str, fraction: float | None = None, whole_softmax: bool = False
) -> RopeConfig:
    """Our rope settings out of a config.json.

    fraction: what `partial_rotary_factor` is when it is not given, for the model types that read it; None for those
    that turn whole heads. whole_softmax: the model type also multiplies its softmax scale (DeepSeek), elsewhere
    `mscale_all_dim` is read beside `mscale` only. Raises SettingsError for a rope type that is not built here and for
    keys that contradict.
    """
    found = merged(config)
    given = found.get("partial_rotary_factor")
    if fraction is None and given not in (None, 1.0):
        raise SettingsError(
            f"config.json: partial_rotary_factor={given}: transformers' {config.kind} turns whole heads, only 1.0"
        )
    return RopeConfig(
        theta=number("rope_theta", found.get("rope_theta", DEFAULT_THETA)),
        fraction=1.0 if fraction is None else number("partial_rotary_factor", fraction if given is None else given),
        style=style,
        scaling=read_scaling(config, found, whole_softmax),
    )


def merged(config: ConfigJson) -> dict[str, Any]:
    """All rope keys in one mapping, whichever way they were written; those that are null left out."""
    places = {"the top of config.json": {key: config.get(key, None) for key in ("rope_theta", "partial_rotary_factor")}}
    for name in ("rope_parameters", "rope_scaling"):
        place = config.get(name, None) or {}
        if not isinstance(place, dict):
            config.refuse(name, "it must be a mapping")
        places[name] = place.get("full_attention", place)  # by layer type: all layers here are full attention
        if not isinstance(places[name], dict):
            config.refuse(name, "full_attention must be a mapping")
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, place in places.items():
        place = dict(place)
        place.setdefault("rope_type", place.get("type"))
        for key, value in place.items():
            if value is None or key == "type":
                continue
            if key in found and found[key] != value:
                raise SettingsError(
                    f"config.json: {key} is {shown(found[key])} in {origin[key]} and {shown(value)} in {name}: "
                    f"remove one of them"
                )
            found[key], origin[key] = value, name
    return found


def read_scaling(config: ConfigJson, found: dict[str, Any], whole_softmax: bool) -> RopeScaling | None:
    kind = found.get("rope_type", "default")
    if kind == "default":
        return None
    if not isinstance(kind, str):
        raise SettingsError(f"config.json: rope_type={shown(kind)} must be a name, such as yarn or llama3")
    length = config.get("original_max_position_embeddings", None) or found.get("original_max_position_embeddings")
    if kind in ("yarn", "llama3") and length is None:
        length = config.count("max_position_embeddings")
    factor = found.get("factor")
    if factor is None and kind == "yarn":  # DeepSeek's form: the ratio of the two lengths
        factor = config.count("max_position_embeddings") / number("original_max_position_embeddings", length)
    # As in transformers: 0 is "not given"; mscale counts only beside mscale_all_dim and without an attention_factor.
    multipliers = {key: number(key, found[key]) for key in _MULTIPLIERS if found.get(key)}
    if found.get("attention_factor") == 0:
        raise SettingsError("config.json: attention_factor=0 would turn all queries and keys into zeros")
    if "mscale_all_dim" not in multipliers or "attention_factor" in multipliers:
        multipliers.pop("mscale", None)
    if not whole_softmax and "mscale" not in multipliers:
        multipliers.pop("mscale_all_dim", None)
    numbers = {key: number(key, found[key]) for key in _NUMBERS if found.get(key)}
    truncate = found.get("truncate", True)
    if kind == "linear":
        length = None
    return RopeScaling(kind, factor, length, **numbers, **multipliers, truncate=truncate)


def write_rope(rope: RopeConfig, *, partial: bool = False) -> dict[str, Any]:
    """The keys of a config.json, new and old ones, for readers of any age. partial: the type reads a fraction."""
    scaling: dict[str, Any] = {}
    if rope.scaling is not None:
        default = RopeScaling("yarn", 1.0, 1)
        for key, value in vars(rope.scaling).items():
            needed = rope.scaling.type == "llama3" and key in ("low_freq_factor", "high_freq_factor")
            if value is not None and (needed or value != getattr(default, key) or key.startswith("original")):
                scaling["rope_type" if key == "type" else key] = value
        scaling = {"rope_type": rope.scaling.type, "factor": rope.scaling.factor, **scaling}
    fraction = {"partial_rotary_factor": rope.fraction} if partial else {}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
        **fraction,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": rope.theta, **fraction},
    }
