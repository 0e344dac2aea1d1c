"""Scalings of the rotary frequencies for contexts longer than those of pretraining.

`linear` (Chen 2023): all frequencies divided by the factor. `yarn` (Peng 2023, "YaRN: Efficient Context Window
Extension of Large Language Models": sections 3.2, NTK-by-parts, and 3.4, the temperature of the softmax; DeepSeek-V2,
section 3.1.4): fast dims stay, slow ones are divided by the factor, a ramp in between, and queries and keys grow.
`llama3` (Llama 3.1's release): the same idea with another ramp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Optional

import torch
from torch import Tensor

from parallel_attn.errors import SettingsError

KEY = "attention.rope.scaling"

_SETTINGS = {  # what each type reads, beyond its factor
    "linear": (),
    "yarn": (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


@dataclass
class RopeScaling:
    """Keys `attention.rope.scaling.<field>`.

    type: linear, yarn or llama3. factor: context of the scaled model / original_max_position_embeddings (tokens).
    yarn: a dim that turns more than beta_fast times in the original context keeps its frequency, one that turns fewer
    than beta_slow times is divided by the factor; truncate rounds the two ends of the ramp to whole dims. mscale with
    mscale_all_dim, or attention_factor itself: see `cos_sin_factor` and `score_factor`.
    llama3: beta_fast and beta_slow are called high_freq_factor and low_freq_factor.

    Raises SettingsError for what cannot work, and for a setting that the type does not read.
    """

    type: str
    factor: float
    original_max_position_embeddings: Optional[int] = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: Optional[float] = None
    mscale_all_dim: Optional[float] = None
    attention_factor: Optional[float] = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.type not in _SETTINGS:
            raise SettingsError(f"{KEY}.type={self.type} is not one of: {', '.join(_SETTINGS)}")
        known = _SETTINGS[self.type]
        for setting in fields(self)[2:]:
            value = getattr(self, setting.name)
            if value != setting.default and setting.name not in known:
                readers = [name for name, settings in _SETTINGS.items() if setting.name in settings]
                raise SettingsError(
                    f"{KEY}.{setting.name}={value} is not read by {KEY}.type={self.type}, only by: {', '.join(readers)}"
                )
        number("factor", self.factor, least=1.0)
        length = self.original_max_position_embeddings
        if "original_max_position_embeddings" in known and (type(length) is not int or length < 1):
            raise SettingsError(
                f"{KEY}.original_max_position_embeddings={length}: {self.type} needs the length in tokens that the "
                f"unscaled model was trained on, a whole number, at least 1"
            )
        if not isinstance(self.truncate, bool):
            raise SettingsError(f"{KEY}.truncate={self.truncate!r} must be true or false")
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            for name in (low, high):
                number(name, getattr(self, name), above=0.0)
            if getattr(self, low) >= getattr(self, high):
                raise SettingsError(
                    f"{KEY}.{low}={getattr(self, low)} must be smaller than {KEY}.{high}={getattr(self, high)}"
                )
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), above=0.0)
        if self.mscale is not None and self.attention_factor is not None:
            raise SettingsError(f"{KEY}.mscale={self.mscale} would go unread beside attention_factor: give one of them")
        if self.mscale is not None and self.mscale_all_dim is None:
            raise SettingsError(f"{KEY}.mscale={self.mscale} goes unread without mscale_all_dim: give both or none")

    def frequencies(self, unscaled: Tensor, theta: float) -> Tensor:
        """Radians per token of each pair: unscaled theta ** (-2i / R), (R/2,), float64 -> scaled, (R/2,), float64."""
        slow = unscaled / self.factor
        if self.type == "linear":
            return slow
        kept = self.kept_by_yarn(unscaled, theta) if self.type == "yarn" else self.kept_by_llama3(unscaled)
        return slow * (1 - kept) + unscaled * kept

    def kept_by_yarn(self, unscaled: Tensor, theta: float) -> Tensor:
        """(R/2,): 1 where a pair keeps its frequency, 0 where it is divided by the factor.

        Peng 2023, section 3.2: 1 - ramp. As in its code the ramp runs over dims, between those that turn beta_fast and
        beta_slow times in the original context.
        """
        if theta <= 1:
            raise SettingsError(f"attention.rope.theta={theta} must be above 1 for {KEY}.type=yarn")
        width = 2 * unscaled.shape[0]

        def dim_that_turns(times: float) -> float:
            turns_at_dim_0 = self.original_max_position_embeddings / (2 * math.pi * times)
            return width * math.log(turns_at_dim_0) / (2 * math.log(theta))

        low, high = dim_that_turns(self.beta_fast), dim_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        if high < low:
            raise SettingsError(
                f"{KEY}.original_max_position_embeddings={self.original_max_position_embeddings} is too short: no dim "
                f"turns {KEY}.beta_slow={self.beta_slow:g} times in it, give at least "
                f"{math.ceil(2 * math.pi * self.beta_slow)}"
            )
        if low == high:
            high += 0.001  # a step instead of a ramp
        dims = torch.arange(width // 2, dtype=unscaled.dtype, device=unscaled.device)
        return 1 - ((dims - low) / (high - low)).clamp(0, 1)

    def kept_by_llama3(self, unscaled: Tensor) -> Tensor:
        """As `kept_by_yarn`; the ramp runs over the turns in the original context instead of over dims."""
        turns = self.original_max_position_embeddings * unscaled / (2 * math.pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by: sqrt(1/t) = 0.1 ln(factor) + 1 of Peng 2023, section 3.4, unless given.

        On queries and on keys alike, so that scores grow by 1/t.

        DeepSeek's form divides by the part that acts on the whole softmax scale (`score_factor`).
        """
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth(1.0)

    @property
    def score_factor(self) -> float:
        """What DeepSeek-V2/V3 multiply the softmax scale with: it reaches the dims without positions as well."""
        return 1.0 if self.mscale_all_dim is None else self.growth(self.mscale_all_dim) ** 2

    def growth(self, mscale: float) -> float:
        """0.1 * mscale * ln(factor) + 1: Peng 2023, section 3.4 (there mscale = 1)."""
        return 0.1 * mscale * math.log(self.factor) + 1.0


def number(name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingsError(f"{KEY}.{name}={value!r} must be a number")
    if not (least <= value < math.inf and value > above):
        wanted = f"above {above:g}" if above > least else f"at least {least:g}"
        raise SettingsError(f"{KEY}.{name}={value} must be {wanted}, and finite")


def as_scaling(value: RopeScaling | dict | None) -> RopeScaling | None:
    """A mapping of the fields becomes a RopeScaling. Raises SettingsError for unknown and for missing keys."""
    if value is None or isinstance(value, RopeScaling):
        return value
    known = [setting.name for setting in fields(RopeScaling)]
    if not isinstance(value, dict):
        raise SettingsError(f"{KEY}={value!r} is not a mapping of: {', '.join(known)}")
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise SettingsError(f"{KEY} has no {unknown}: {', '.join(known)}")
    for key, choices in (("type", ", ".join(_SETTINGS)), ("factor", "a number, at least 1")):
        if key not in value:
            raise SettingsError(f"{KEY}.{key} has no value: give {choices}")
    return RopeScaling(**value)
