"""What every attention type shares: its settings, its place on the tensor axis, and what it must declare.

A new type is a subclass in a file of its own plus one YAML that names it. It declares its projections and how each is
sharded (by building them), its forward, and its cache and FLOPs (by the two methods below).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from parallel_attn.errors import SettingsError
from parallel_attn.nn.module import Placement, ShardedModule
from parallel_attn.nn.rotary import RopeConfig
from parallel_attn.sharding import HeadPlan


@dataclass
class AttentionConfig:
    """Settings that any type can have. Each field is a key `attention.<field>`."""

    num_heads: int
    head_dim: Optional[int] = None
    v_head_dim: Optional[int] = None
    bias: str = "none"
    causal: bool = True
    qk_norm: str = "none"
    qk_norm_zero_centered: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)


def check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{key}={value} is not one of: {', '.join(choices)}")


def check_types(config: AttentionConfig) -> None:
    """Raises SettingsError for a count that is no whole number, and for rope settings of another kind."""
    for key, value in vars(config).items():
        if key.endswith(("_dim", "_heads", "_rank")) and value is not None and type(value) is not int:
            raise SettingsError(f"attention.{key}={value!r} must be a whole number")
    if isinstance(config.rope, dict):
        unknown = set(config.rope) - set(RopeConfig.__dataclass_fields__)
        if unknown:
            raise SettingsError(f"attention.rope has no {sorted(unknown)}: {', '.join(RopeConfig.__dataclass_fields__)}")
        config.rope = RopeConfig(**config.rope)
    if not isinstance(config.rope, RopeConfig):
        raise SettingsError(f"attention.rope={config.rope!r} is not a mapping of theta, fraction and style")


class Attention(ShardedModule, ABC):
    """Base of all attention types: x (B, S, D) replicated over the tensor axis -> (B, S, D) replicated.

    hidden_size: D. config: the type's `Config`, or its fields as keywords.
    tensor_parallel: a DeviceMesh (one dim, or with a dim called "tensor"), a process group, or None for one rank.
    seed, name: the initial weights are a function of (seed, full name); without a name the layer gets a construction
    number, so that two layers never start identical.
    output_scale multiplies the initial std of the output projection; norm_eps belongs to the q/k norms.

    Raises SettingsError for settings that cannot work.
    """

    Config: ClassVar[type[AttentionConfig]] = AttentionConfig

    def __init__(
        self,
        hidden_size: int,
        config: AttentionConfig | None = None,
        *,
        tensor_parallel: Any = None,
        seed: int = 0,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        output_scale: float = 1.0,
        norm_eps: float = 1e-6,
        placement: Placement | None = None,
        **settings: Any,
    ) -> None:
        if placement is None:
            placement = Placement.standalone(
                "attention", tensor=tensor_parallel, name=name, seed=seed, device=device, dtype=dtype
            )
        super().__init__(placement)
        if config is None:
            known = {f.name for f in fields(self.Config)}
            for key in settings:
                if key not in known:
                    raise SettingsError(f"attention.{key} is not a setting of {type(self).__name__}: {sorted(known)}")
            config = self.Config(**settings)
        elif not isinstance(config, self.Config):
            raise SettingsError(
                f"{type(self).__name__}: config={config!r} is not a {self.Config.__name__}, give its fields as keywords"
            )
        elif settings:
            raise SettingsError(f"{type(self).__name__}: give a config or its fields {sorted(settings)}, not both")
        self.hidden_size, self.config = hidden_size, config
        check_types(config)
        self.output_scale, self.norm_eps = output_scale, norm_eps
        check_choice("attention.bias", config.bias, ("none", "qkv", "all"))
        check_choice("attention.qk_norm", config.qk_norm, ("none", "head", "full"))
        self.head_dim = self.resolve_head_dim()
        self.v_head_dim = config.v_head_dim if config.v_head_dim is not None else self.head_dim
        for key, width in (("head_dim", self.head_dim), ("v_head_dim", self.v_head_dim)):
            if width < 1:
                raise SettingsError(f"attention.{key}={width} must be at least 1")

    def resolve_head_dim(self) -> int:
        config = self.config
        if config.head_dim is not None:
            return config.head_dim
        if config.num_heads < 1 or self.hidden_size % config.num_heads:
            raise SettingsError(
                f"attention.num_heads={config.num_heads} does not divide model.hidden_size={self.hidden_size}: "
                f"set attention.head_dim"
            )
        return self.hidden_size // config.num_heads

    plan: HeadPlan
    """Which heads this type puts on which rank."""

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """x (B, S, D) -> (B, S, D).

        positions (S,) or (B, S): default 0..S-1. key_padding_mask (B, S) bool, True where a token is real: what padded
        slots hold, even a NaN, reaches no other slot and no gradient. document_ids (B, S): attention stays inside equal ids.
        """

    @abstractmethod
    def cache_elements_per_token(self, rank: int | None = None) -> int:
        """Elements that tensor rank `rank` (default: this one) caches per token in generation."""

    @abstractmethod
    def core_flops_per_token(self, context: int) -> int:
        """Forward FLOPs (2 per multiply-add) of scores and weighted sum for one query over `context` keys, all heads."""
