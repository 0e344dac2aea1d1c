"""Reading a `config.json` as transformers writes it, key by key, with refusals that name the key."""

from __future__ import annotations

from typing import Any

from parallel_attn.errors import SettingsError

_MISSING = object()


class ConfigJson:
    """The mapping of a config.json. Every refusal is one line: the key, its value, what would work."""

    def __init__(self, values: dict) -> None:
        if not isinstance(values, dict) or "model_type" not in values:
            raise SettingsError("config.json has no model_type: it is not the config of a transformers model")
        self.values, self.kind = values, values["model_type"]
        if values.get("quantization_config") is not None:
            self.refuse("quantization_config", "quantized weights cannot be read, take the unquantized model")

    def refuse(self, key: str, reason: str) -> None:
        raise SettingsError(f"config.json: {key}={shown(self.values.get(key))}: {reason}")

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value, or the default that this model type has in transformers. Raises SettingsError without either."""
        value = self.values.get(key, default)
        if value is _MISSING:
            raise SettingsError(f"config.json: {key} is missing, a {self.kind} model needs it")
        return value

    def count(self, key: str, default: Any = _MISSING) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise SettingsError(f"config.json: {key}={shown(value)} must be a whole number, at least 1")
        return value

    def must_be(self, key: str, wanted: Any, reason: str, *, default: Any = _MISSING) -> None:
        """Raises SettingsError unless the value (or the type's default) is `wanted`."""
        if self.get(key, wanted if default is _MISSING else default) != wanted:
            self.refuse(key, f"{reason}, only {shown(wanted)} can be expressed")


def shown(value: Any) -> Any:
    """As JSON writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value
