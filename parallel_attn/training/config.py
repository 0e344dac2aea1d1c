"""The typed configuration of a training job, and the checks that need no process group.

Sections are dataclasses. Where a group offers a choice of classes (attention, data, optimizer, schedule, engine), its
YAML names the class by `_target_`, and the class's own `Config` dataclass is the schema.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Optional

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from parallel_attn.attention.base import Attention
from parallel_attn.data import Corpus, Tokenizer
from parallel_attn.errors import SettingsError
from parallel_attn.models import LanguageModel, ModelConfig
from parallel_attn.tracking import TrackingConfig
from parallel_attn.training.engines import Engine
from parallel_attn.training.optimizer import AdamW
from parallel_attn.training.schedule import Schedule


@dataclass
class ParallelConfig:
    tensor: int = 1
    data: Optional[int] = None


@dataclass
class TrainConfig:
    steps: int = 600
    seq_len: int = 128
    micro_batch_size: Optional[int] = None
    global_batch_size: int = 8
    precision: str = "fp32"
    seed: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    log_every: int = 20
    deterministic: bool = False
    hang_timeout: float = 600.0

    def check(self) -> None:
        for key in ("steps", "seq_len", "global_batch_size", "log_every"):
            require(getattr(self, key) >= 1, f"train.{key}", getattr(self, key), "at least 1")
        if self.micro_batch_size is not None:
            require(self.micro_batch_size >= 1, "train.micro_batch_size", self.micro_batch_size, "at least 1, or null")
        if self.precision not in ("fp32", "bf16", "fp64"):
            raise SettingsError(f"train.precision={self.precision} is not one of: fp32, bf16, fp64")
        require(0 <= self.label_smoothing < 1, "train.label_smoothing", self.label_smoothing, "in [0, 1)")
        require(0 <= self.z_loss < math.inf, "train.z_loss", self.z_loss, "0 or more")
        require(self.seed >= 0, "train.seed", self.seed, "0 or more")
        require(0 <= self.hang_timeout < math.inf, "train.hang_timeout", self.hang_timeout, "0 (off) or more seconds")

    def micro_batches(self, data_degree: int) -> tuple[int, int]:
        """(micro batch size, micro batches per optimizer step) of one replica.

        Raises SettingsError when the global batch is not micro batch x replicas x accumulation.
        """
        total, micro = self.global_batch_size, self.micro_batch_size
        if micro is None:
            if total % data_degree:
                raise SettingsError(
                    f"train.global_batch_size={total} is not a multiple of the {data_degree} replicas "
                    f"(parallel.data): use {total - total % data_degree or data_degree} or "
                    f"{total + data_degree - total % data_degree}"
                )
            return total // data_degree, 1
        share = micro * data_degree
        if total % share:
            raise SettingsError(
                f"train.global_batch_size={total} is not train.micro_batch_size={micro} x {data_degree} replicas x a "
                f"whole number of micro batches: use a multiple of {share}"
            )
        return micro, total // share


@dataclass
class EvalConfig:
    every: int = 200
    samples: int = 128

    def check(self) -> None:
        require(self.every >= 0, "eval.every", self.every, "0 (off) or more")
        require(self.samples >= 1, "eval.samples", self.samples, "at least 1")


@dataclass
class CheckpointConfig:
    every: int = 200
    keep: int = 2
    resume: str = "auto"

    def check(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every, "0 (off) or more")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
        require(self.resume.strip() != "", "checkpoint.resume", "''", "auto, never, or a run or checkpoint folder")


@dataclass
class Choice:
    """A class that a YAML names, and its settings."""

    cls: type
    config: Any


@dataclass
class Config:
    model: ModelConfig
    model_class: type[LanguageModel]
    attention: Choice
    data: Choice
    tokenizer: Choice
    optimizer: Choice
    schedule: Choice
    engine: Choice
    parallel: ParallelConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    tracking: TrackingConfig
    device: str = "auto"
    run_dir: Optional[str] = None
    plain: dict = field(default_factory=dict, repr=False)
    """The same, resolved, as nested plain values: what is written to config.yaml and to W&B."""

    def check(self) -> None:
        """All checks of single sections. Raises SettingsError."""
        self.model.check()
        self.train.check()
        self.model.check_data(self.train.seq_len, self.data.config.documents)
        self.eval.check()
        self.checkpoint.check()
        self.tracking.check()
        for choice in (self.optimizer, self.engine):
            choice.config.check()
        require(self.run_dir != "", "run_dir", "''", "a folder, or null")
        self.schedule.cls(self.schedule.config, self.optimizer.config.lr, self.train.steps)


def require(holds: bool, key: str, value: Any, wanted: str) -> None:
    if not holds:
        raise SettingsError(f"{key}={value} must be {wanted}")


_PLAIN = {
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "tracking": TrackingConfig,
}
_CHOICES = {
    "model": LanguageModel,
    "attention": Attention,
    "data": Corpus,
    "tokenizer": Tokenizer,
    "optimizer": AdamW,
    "schedule": Schedule,
    "engine": Engine,
}


@dataclass
class _TopLevel:
    device: str = "auto"
    run_dir: Optional[str] = None


def parse(raw: DictConfig | dict) -> Config:
    """Composed YAML -> typed Config. Raises SettingsError naming the key for unknown keys, wrong types, missing values."""
    if not isinstance(raw, DictConfig):
        raw = OmegaConf.create(raw)
    try:
        plain = OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise SettingsError(f"{error.full_key} has no value: it must be given") from error
    except OmegaConfBaseException as error:
        raise SettingsError(f"{error.full_key}: {_first_line(error)}") from error
    sections = {}
    rest = dict(plain)
    for name, schema in _PLAIN.items():
        sections[name] = _typed(name, schema, rest.pop(name, {}))
    for name, base in _CHOICES.items():
        sections[name] = _choice(name, base, rest.pop(name, None))
    top = _typed("", _TopLevel, rest)
    model = sections.pop("model")
    config = Config(model.config, model.cls, **sections, device=top.device, run_dir=top.run_dir, plain=plain)
    config.check()
    return config


def _choice(name: str, base: type, settings: dict | None, override: str | None = None) -> Choice:
    """The class that `settings` name, a subclass of `base`, and its typed settings. override: how to choose it, where
    that is not by `name`."""
    from hydra.utils import get_class

    if not isinstance(settings, dict) or "_target_" not in settings:
        raise SettingsError(f"{name} names no class: choose one with {override or name}=CHOICE")
    settings = dict(settings)
    target = settings.pop("_target_")
    try:
        cls = get_class(target)
    except (ImportError, ValueError) as error:
        raise SettingsError(f"{name}._target_={target} cannot be imported: {_first_line(error)}") from error
    if not issubclass(cls, base):
        raise SettingsError(f"{name}._target_={target} is not a subclass of {base.__name__}")
    chosen = {}  # fields that are a choice of a group themselves: model.cross_attention
    for part in fields(cls.Config):
        if "group" in part.metadata:
            key, group = f"{name}.{part.name}", part.metadata["group"]
            choice = _choice(key, part.metadata["base"], settings.pop(part.name, None), f"{group}@{key}")
            chosen[part.name] = part.metadata["as"](choice.cls, choice.config, key)
    return Choice(cls, replace(_typed(name, cls.Config, settings), **chosen))


def _typed(name: str, schema: type, values: Any) -> Any:
    if not isinstance(values, dict):
        raise SettingsError(f"{name}={values} is a group of keys: choose one with {name}=CHOICE or set {name}.KEY")
    prefix = f"{name}." if name else ""
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except MissingMandatoryValue as error:
        raise SettingsError(f"{prefix}{error.full_key} has no value: it must be given") from error
    except OmegaConfBaseException as error:
        key = f"{prefix}{error.full_key}" if error.full_key else name
        known = ""
        if "not in" in _first_line(error):
            known = f"; keys here: {', '.join(sorted(schema.__dataclass_fields__))}"
        raise SettingsError(f"{key}: {_first_line(error)}{known}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def plain_config(config: Config) -> dict:
    """The resolved configuration with the values that were derived, as nested plain values."""
    plain = dict(config.plain)
    plain["model"] = plain["model"] | {"vocab_size": config.model.vocab_size}
    return plain
