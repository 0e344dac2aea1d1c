"""Settings of the tracking room: the keys under `tracking` in the run's config."""

from dataclasses import dataclass, field
from typing import Optional

from parallel_attn.errors import SettingsError

WANDB_MODES = ("auto", "online", "offline", "disabled")
CONSOLES = ("auto", "bar", "lines", "none")

# What W&B itself refuses (its server answers with an error after the run has started, which is too late for us).
_FORBIDDEN_IN_PROJECT = "/\\#?%:"
_PROJECT_LENGTH = 128
_TAG_LENGTH = 64


@dataclass
class WandbConfig:
    """Where Weights & Biases records the run.

    `mode`: auto (online if an API key is found without asking, else offline), online, offline, disabled.
    """

    mode: str = "auto"
    project: str = "parallel_attn"
    entity: Optional[str] = None
    group: Optional[str] = None
    name: Optional[str] = None
    tags: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises SettingsError for a value that W&B or we cannot honour."""
        _one_of("tracking.wandb.mode", self.mode, WANDB_MODES)
        if not self.project or len(self.project) > _PROJECT_LENGTH or set(self.project) & set(_FORBIDDEN_IN_PROJECT):
            raise SettingsError(
                f"tracking.wandb.project={self.project!r}: must have 1 to {_PROJECT_LENGTH} characters, "
                f"none of them among {' '.join(_FORBIDDEN_IN_PROJECT)}"
            )
        for tag in self.tags:
            if not 1 <= len(tag) <= _TAG_LENGTH:
                raise SettingsError(
                    f"tracking.wandb.tags={list(self.tags)}: the tag {tag!r} has {len(tag)} characters, "
                    f"each tag must have 1 to {_TAG_LENGTH}"
                )


@dataclass
class TrackingConfig:
    """`console`: auto (bar on a terminal, else lines), bar, lines, none (warnings only)."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    console: str = "auto"

    def check(self) -> None:
        """Raises SettingsError for a wrong choice; the message names the key, its value and the choices."""
        _one_of("tracking.console", self.console, CONSOLES)
        self.wandb.check()


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{key}={value!r}: must be one of {', '.join(choices)}")
