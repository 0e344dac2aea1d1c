"""Cross attention: queries from a decoder, keys and values from an encoder's states (Vaswani 2017, section 3.2.3).

Shapes: B batch, S decoder tokens, T encoder tokens, D / M width of decoder / encoder, H/K query/KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from parallel_attn.attention.caches import Cache
from parallel_attn.attention.config import AttentionConfig, refuse_touched
from parallel_attn.attention.given import Given, by_head, without_padding
from parallel_attn.attention.grouped import GroupedConfig, GroupedQueryAttention
from parallel_attn.errors import SettingsError
from parallel_attn.nn.linear import ColumnParallelLinear, column_parallel
from parallel_attn.nn.rotary import RopeConfig


@dataclass
class CrossConfig(GroupedConfig):
    causal: bool = False
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(fraction=0.0))


_NO_ORDER = "has no order between decoder and encoder tokens"


class CrossAttention(GroupedQueryAttention):
    """Grouped-query attention whose keys and values read `memory` (B, T, M); memory_size: M, by default D.

    Parameters as in GroupedQueryAttention, with k.weight (K E, M) and v.weight (K Ev, M). No positions, not causal.
    """

    Config = CrossConfig
    reads_memory = True
    cannot_honour = dict.fromkeys(("causal", "window", *(f"rope.{f.name}" for f in fields(RopeConfig))), _NO_ORDER)

    def __init__(
        self, hidden_size: int, config: CrossConfig | None = None, *, memory_size: int | None = None, **kwargs: Any
    ) -> None:
        self.memory_size = hidden_size if memory_size is None else memory_size
        if type(self.memory_size) is not int or self.memory_size < 1:
            raise SettingsError(f"memory_size={self.memory_size!r} must be a whole number, at least 1")
        super().__init__(hidden_size, config, **kwargs)

    @classmethod
    def config_from(cls, kind: type, config: AttentionConfig, key: str = "attention") -> CrossConfig:
        """The cross form of a self-attention type's settings; what orders tokens must be at that type's defaults.

        Raises SettingsError for a type that has none, and for such a setting.
        """
        if isinstance(config, CrossConfig):
            return config
        if kind is not GroupedQueryAttention:
            raise SettingsError(f"{key}: {kind.__name__} has no cross form; choose cross or a grouped-query type")
        refuse_touched(config, cls.cannot_honour, cls.__name__, key)
        orders = {name.partition(".")[0] for name in cls.cannot_honour}
        return CrossConfig(**{f.name: getattr(config, f.name) for f in fields(config) if f.name not in orders})

    @property
    def memory_readers(self) -> list[ColumnParallelLinear]:
        """The projections whose input is `memory`."""
        return [self.k, self.v]

    def mean_keys(self, tokens: int, memory: int) -> float:
        return float(memory)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        *,
        key_padding_mask: Tensor | None = None,
        samples: Tensor | None = None,
        step: int | Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """x (B, S, D), memory (B, T, M), both replicated -> (B, S, D).

        key_padding_mask (B, T) bool, True where an encoder token is real: what the others hold reaches nothing, their
        gradient is zero. samples, step: as in Attention.forward. cache: of `new_cache(B, T)`; an empty one takes the keys
        and values of memory and mask, with a filled one both are left out (None): they are computed once.

        Raises ValueError for a cache of another layer or batch, and for neither or both of memory and a filled cache.
        """
        given = Given(None, key_padding_mask, None, samples, step, cache)
        filled = cache is not None and cache.length > 0
        if filled != (memory is None):
            raise ValueError("cross attention reads memory, or a cache that was filled with it: give one of them")
        if cache is not None:
            cache.check_layer(self.cache_shapes(), self.config.window)
            cache.check_room(x.shape[0], 0 if filled else memory.shape[1])
        q, *gate = column_parallel(x, [self.q, *self.gates])
        if filled:
            (k, v), given.key_padding_mask = cache.contents()
            q, _ = self.normalized(by_head(q, self.head_dim), None)
        else:
            k, v = column_parallel(without_padding(memory, key_padding_mask), self.memory_readers)
            q, k, v = self.heads(q, k, v)
            k, v = given.seen(k=k, v=v)
        return self.output(self.core(q, k, v, given), *gate or [None])
