"""Reading a `config.json` as transformers writes it, key by key, with refusals that name the key."""

from __future__ import annotations

from typing import Any

from parallel_attn.errors import SettingsError

_MISSING = object()


class ConfigJson:
    """The mapping of a config.json. Every refusal is one line: the key, its value, what would work."""

    def __init__(self, values: dict) -> None:
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
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

    def number(self, key: str, default: float) -> float:
        """null counts as not given."""
        value = self.get(key, None)
        return default if value is None else number(key, value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false; null is false, as in transformers. A text such as "false" is neither."""
        value = self.get(key, default)
        if value is not None and type(value) is not bool:
            raise SettingsError(f"config.json: {key}={shown(value)} must be true or false")
        return bool(value)

    def names(self, key: str) -> list[str] | None:
        """A list of texts, None where it is not given."""
        value = self.get(key, None)
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise SettingsError(f"config.json: {key}={shown(value)} must be a list of names")
        return value

    def must_be_off(self, key: str, reason: str) -> None:
        if self.flag(key):
            self.refuse(key, f"{reason}, only false can be expressed")


def number(key: str, value: Any) -> float:
    """Raises SettingsError, naming the key of the config.json, for what JSON does not write as a number."""
    if type(value) not in (int, float):
        raise SettingsError(f"config.json: {key}={shown(value)} must be a number")
    return float(value)


def shown(value: Any) -> Any:
    """As JSON writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value
