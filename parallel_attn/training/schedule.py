"""Learning rate by optimizer step, counted from 0. Functions of the step alone: there is nothing to save."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Optional

from parallel_attn.errors import SettingsError


@dataclass
class ScheduleConfig:
    warmup_steps: Optional[int] = None


@dataclass
class CosineConfig(ScheduleConfig):
    final_fraction: float = 0.1


@dataclass
class WarmupStableDecayConfig(ScheduleConfig):
    decay_steps: Optional[int] = None
    final_fraction: float = 0.1


class Schedule(ABC):
    """`rate(step)` is the learning rate of optimizer step 0 .. steps - 1.

    All begin with a linear warm-up that reaches the peak at its last step. Raises SettingsError for a warm-up (and decay)
    that does not fit into the steps.
    """

    Config: Any

    def __init__(self, config: ScheduleConfig, peak: float, steps: int) -> None:
        self.config, self.peak, self.steps = config, peak, steps
        # One twentieth, so that a run of 10 steps and one of 10,000 both have a sane default.
        self.warmup_steps = steps // 20 if config.warmup_steps is None else config.warmup_steps
        if not 0 <= self.warmup_steps < steps:
            raise SettingsError(
                f"schedule.warmup_steps={config.warmup_steps} must lie in 0 .. {steps - 1} for train.steps={steps} "
                f"(null: a twentieth of the steps)"
            )
        fraction = getattr(config, "final_fraction", 1.0)
        if not 0.0 <= fraction <= 1.0:
            raise SettingsError(f"schedule.final_fraction={fraction} must lie in [0, 1]")

    def rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.peak * self.after_warmup(step)

    @abstractmethod
    def after_warmup(self, step: int) -> float:
        """The part of the peak at a step after the warm-up."""


class Cosine(Schedule):
    """Half a cosine (Loshchilov & Hutter 2017, eq. 5) from the peak to exactly `final_fraction` at the last step.

    A single step after the warm-up runs at the peak.
    """

    Config = CosineConfig

    def after_warmup(self, step: int) -> float:
        span = self.steps - 1 - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / span) if span else 0.0
        floor = self.config.final_fraction
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


class WarmupStableDecay(Schedule):
    """The peak, then a linear decay over the last `decay_steps` to exactly `final_fraction` (Hu 2024, section 4).

    `decay_steps=None` is a fifth of the steps (what the warm-up leaves of it); 0 stays at the peak.
    """

    Config = WarmupStableDecayConfig

    def __init__(self, config: WarmupStableDecayConfig, peak: float, steps: int) -> None:
        super().__init__(config, peak, steps)
        room = steps - self.warmup_steps
        self.decay_steps = min(steps // 5, room) if config.decay_steps is None else config.decay_steps
        if not 0 <= self.decay_steps <= room:
            raise SettingsError(
                f"schedule.decay_steps={config.decay_steps} must lie in 0 .. {room}: train.steps={steps} less a "
                f"warm-up of {self.warmup_steps}"
            )

    def after_warmup(self, step: int) -> float:
        into_decay = step - (self.steps - self.decay_steps) + 1
        if into_decay <= 0:
            return 1.0
        progress = min(1.0, into_decay / self.decay_steps)
        return 1.0 - (1.0 - self.config.final_fraction) * progress


class Constant(Schedule):
    """The peak to the end."""

    Config = ScheduleConfig

    def after_warmup(self, step: int) -> float:
        return 1.0
