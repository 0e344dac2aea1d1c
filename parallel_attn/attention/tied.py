"""Grouped tied attention (Zadouri, Strauss, Dao 2025): one projection serves as value and as key.

Shapes: B batch, S sequence, D model width, H query heads, K tied heads, E head width, R rope width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from parallel_attn.attention.base import Attention
from parallel_attn.attention.config import AttentionConfig
from parallel_attn.attention.given import Given, by_head, with_rope_key
from parallel_attn.attention.grouped import default_kv_heads
from parallel_attn.errors import SettingsError
from parallel_attn.nn.linear import column_parallel
from parallel_attn.nn.rotary import RopeConfig
from parallel_attn.sharding import HeadPlan


@dataclass
class TiedConfig(AttentionConfig):
    num_kv_heads: Optional[int] = None
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(fraction=0.5))


class GroupedTiedAttention(Attention):
    """K tied heads, each the value (all E dims) and the first E - R dims of the key of its group of query heads; the last
    R dims of every key are one shared rope key. R = E * rope.fraction, a half by default; 0: no positions.

    Parameters (full shapes): q.weight (H E, D), kv.weight (K E, D), k_rope.weight (R, D), o.weight (D, H E); biases of
    all but o with `bias=qkv`, of o too with `bias=all`. Softmax scale E ** -0.5.
    """

    Config = TiedConfig
    cannot_honour = {
        "v_head_dim": "has the same vectors for keys and values (attention.head_dim)",
        "qk_norm": "would norm its values with its keys",
        "qk_norm_zero_centered": "would norm its values with its keys",
    }

    def __init__(self, hidden_size: int, config: TiedConfig | None = None, **kwargs: Any) -> None:
        super().__init__(hidden_size, config, **kwargs)
        config, degree = self.config, self.tensor_axis.degree
        tied = config.num_kv_heads if config.num_kv_heads is not None else default_kv_heads(config.num_heads)
        self.plan = HeadPlan(config.num_heads, tied, degree, kv_name="tied head")
        self.scale = self.head_dim**-0.5
        fraction, bias = config.rope.fraction, config.bias != "none"
        self.rope_dim = int(self.head_dim * fraction) if 0 <= fraction <= 1 else -1
        if self.rope_dim < 0 or self.rope_dim % 2 or (self.rope_dim == 0) != (fraction == 0):
            raise SettingsError(
                f"attention.rope.fraction={fraction} of attention.head_dim={self.head_dim} is a rope key of width "
                f"{max(self.rope_dim, 0)}: it must be even, between 0 (fraction 0: no positions) and the head"
            )
        self.rotary = self.rotary_of(self.rope_dim, fraction=float(self.rope_dim > 0))
        self.q = self.column("q", config.num_heads, self.plan.query_heads, self.head_dim, bias=bias)
        self.kv = self.column("kv", tied, self.plan.kv_heads, self.head_dim, bias=bias)
        if self.rope_dim:
            self.k_rope = self.shared_rope_key(self.rope_dim, bias=bias)
        self.build_output(gate_bias=bias)

    def mix(self, x: Tensor, given: Given) -> Tensor:
        roped = [self.k_rope] if self.rope_dim else []
        q, tied, *rest = column_parallel(x, [self.q, self.kv, *roped, *self.gates])
        q, tied = by_head(q, self.head_dim), by_head(tied, self.head_dim)
        if not self.rope_dim:
            (tied,) = given.seen(tied=tied)
            return self.output(self.core(q, tied, tied, given), *rest or [None])
        nope = self.head_dim - self.rope_dim
        q = torch.cat([q[..., :nope], self.rotary(q[..., nope:], given.positions)], dim=-1)
        tied, rope_key = given.seen(tied=tied, rope_key=self.turned_rope_key(rest.pop(0), given))
        k = with_rope_key(tied[..., :nope], rope_key)
        return self.output(self.core(q, k, tied, given), *rest or [None])

    def cache_shapes(self, rank: int | None = None) -> dict[str, tuple[int, ...]]:
        rope_key = {"rope_key": (self.rope_dim,)} if self.rope_dim else {}
        return {"tied": (self.shared_heads(rank), self.head_dim)} | rope_key
