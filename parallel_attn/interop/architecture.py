"""What a model here is built from, and the checks that export makes on it."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from parallel_attn.attention import Attention, AttentionConfig
from parallel_attn.errors import SettingsError
from parallel_attn.interop.config_json import shown
from parallel_attn.models import ModelConfig


@dataclass(frozen=True)
class Architecture:
    """The arguments of a DecoderLM: `DecoderLM(a.model, a.attention_class, a.attention)`."""

    model: ModelConfig
    attention_class: type[Attention]
    attention: AttentionConfig

    def layer(self) -> Attention:
        """One attention layer without memory. It checks the settings and knows those left to their defaults."""
        return self.attention_class(self.model.hidden_size, self.attention, name="attention", device="meta")


class Unwritten:
    """The settings of an attention config, ticked off one by one: what is left must be at its default.

    So a setting that nobody thought of is refused by name, never dropped.
    """

    def __init__(self, config: AttentionConfig, kind: str) -> None:
        self.config, self.kind = config, kind
        self.left = {f.name: f for f in fields(config)}

    def take(self, key: str) -> Any:
        """The value, which the caller writes."""
        self.left.pop(key, None)
        return getattr(self.config, key)

    def skip(self, *keys: str) -> None:
        """Settings that say nothing about the function that the model computes."""
        for key in keys:
            self.left.pop(key, None)

    def must_be(self, key: str, *wanted: Any, note: str = "") -> Any:
        """Raises SettingsError unless the value is one of `wanted`."""
        value = self.take(key)
        if value not in wanted:
            self.refuse(key, value, " or ".join(str(shown(choice)) for choice in wanted), note)
        return value

    def refuse(self, key: str, value: Any, wanted: Any, note: str = "") -> None:
        note = f" ({note})" if note else ""
        raise SettingsError(f"attention.{key}={shown(value)} cannot be expressed as {self.kind}, only {wanted}{note}")

    def finish(self) -> None:
        for key, setting in self.left.items():
            default = setting.default if setting.default is not MISSING else setting.default_factory()
            if getattr(self.config, key) != default:
                self.refuse(key, getattr(self.config, key), shown(default))
