"""Learning rate by optimizer step, counted from 0."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Optional

from parallel_attn.errors import SettingsError


@dataclass
class CosineConfig:
    warmup_steps: Optional[int] = None
    final_fraction: float = 0.1


class Schedule(ABC):
    """`rate(step)` is the learning rate of optimizer step 0 .. steps - 1. A function of the step alone: nothing to save."""

    Config = CosineConfig

    def __init__(self, config, peak: float, steps: int) -> None:
        self.config, self.peak, self.steps = config, peak, steps
        warmup = config.warmup_steps
        # One twentieth, so that a run of 10 steps and one of 10,000 both have a sane default.
        self.warmup_steps = steps // 20 if warmup is None else warmup
        if not 0 <= self.warmup_steps < steps:
            raise SettingsError(
                f"schedule.warmup_steps={warmup} must lie in 0 .. {steps - 1} for train.steps={steps} "
                f"(null: a twentieth of the steps)"
            )
        if not 0.0 <= config.final_fraction <= 1.0:
            raise SettingsError(f"schedule.final_fraction={config.final_fraction} must lie in [0, 1]")

    def rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.after_warmup(step)

    @abstractmethod
    def after_warmup(self, step: int) -> float: ...


class Cosine(Schedule):
    """Linear warm-up to the peak, then half a cosine (Loshchilov & Hutter 2017, eq. 5) that reaches exactly
    `final_fraction` x peak at the last step. A single step runs at the peak."""

    def after_warmup(self, step: int) -> float:
        span = self.steps - 1 - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / span) if span else 0.0
        floor = self.config.final_fraction
        return self.peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
