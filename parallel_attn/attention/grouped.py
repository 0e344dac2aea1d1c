"""Grouped-query attention (Ainslie 2023). MHA (Vaswani 2017) and MQA (Shazeer 2019) are the same class with
`num_kv_heads` equal to `num_heads` or to 1.

Shapes: B batch, S sequence, D model width, H/K query/KV heads, E head width, Ev value head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from parallel_attn.attention.base import Attention
from parallel_attn.attention.config import AttentionConfig
from parallel_attn.attention.given import Given, by_head
from parallel_attn.collectives import copy, reduce
from parallel_attn.nn.linear import column_parallel
from parallel_attn.nn.norm import HeadGain, RMSNorm, at_least_float32
from parallel_attn.sharding import HeadPlan


@dataclass
class GroupedConfig(AttentionConfig):
    num_kv_heads: Optional[int] = None


def default_kv_heads(num_heads: int) -> int:
    """A quarter of the query heads, rounded to the nearest divisor of them that is at least 2 (1 for a single head)."""
    divisors = [d for d in range(1, num_heads + 1) if num_heads % d == 0 and (d >= 2 or num_heads == 1)]
    return min(divisors, key=lambda d: abs(d - num_heads / 4)) if divisors else 1


class GroupedQueryAttention(Attention):
    """K KV heads, each shared by a group of H / K query heads; `num_kv_heads=None` is a quarter of H.

    Parameters (full shapes): q.weight (H E, D), k.weight (K E, D), v.weight (K Ev, D), o.weight (D, H Ev), gate.weight
    (H Ev or H, D); biases of q, k, v and gate with `bias=qkv`, of o too with `bias=all`; q_norm, k_norm gains (E,) with
    `qk_norm=head`, (H E,) and (K E,) with `qk_norm=full`; sinks (H,). The norms act before rotary. Softmax scale E ** -0.5.

    With gate, zero-centred norms per head and a rotary part it is the full-attention layer of Qwen3-Next and Qwen3.5.
    """

    Config = GroupedConfig
    memory_size: int | None = None
    """Width of what keys and values read, where that is not x."""

    def __init__(self, hidden_size: int, config: GroupedConfig | None = None, **kwargs: Any) -> None:
        super().__init__(hidden_size, config, **kwargs)
        config, place = self.config, self.placement
        kv_heads = config.num_kv_heads if config.num_kv_heads is not None else default_kv_heads(config.num_heads)
        self.plan = HeadPlan(config.num_heads, kv_heads, self.tensor_axis.degree)
        self.scale = self.head_dim**-0.5
        query, kv, bias = self.plan.query_heads, self.plan.kv_heads, config.bias != "none"
        self.rotary = self.rotary_of(self.head_dim, fraction=config.rope.fraction)
        self.q = self.column("q", config.num_heads, query, self.head_dim, bias=bias)
        self.k = self.column("k", kv_heads, kv, self.head_dim, inputs=self.memory_size, bias=bias)
        self.v = self.column("v", kv_heads, kv, self.v_head_dim, inputs=self.memory_size, bias=bias)
        self.build_output(gate_bias=bias)
        zero_centered = config.qk_norm_zero_centered
        if config.qk_norm == "head":
            self.q_norm, self.k_norm = (
                RMSNorm(
                    place.child(name), self.head_dim, eps=self.norm_eps, zero_centered=zero_centered, rank_local=True
                )
                for name in ("q_norm", "k_norm")
            )
        elif config.qk_norm == "full":
            self.q_norm, self.k_norm = (
                HeadGain(place.child(name), self.head_dim, heads, ranges, zero_centered=zero_centered)
                for name, heads, ranges in (("q_norm", config.num_heads, query), ("k_norm", kv_heads, kv))
            )

    def mix(self, x: Tensor, given: Given) -> Tensor:
        q, k, v, *gate = column_parallel(x, [self.q, self.k, self.v, *self.gates])
        q, k, v = self.heads(q, k, v)
        k, v = given.seen(k=self.rotary(k, given.positions), v=v)
        return self.output(self.core(self.rotary(q, given.positions), k, v, given), *gate or [None])

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, H_local E), (B, T, K_local E), (B, T, K_local Ev) -> by head, q and k normed."""
        q, k = self.normalized(by_head(q, self.head_dim), by_head(k, self.head_dim))
        return q, k, by_head(v, self.v_head_dim)

    def normalized(self, q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """q (B, S, H_local, E), k (B, T, K_local, E) or None after the q/k norms, if any."""
        if self.config.qk_norm == "none":
            return q, k
        if self.config.qk_norm == "head":
            return self.q_norm(q), None if k is None else self.k_norm(k)
        # One sum over the axis for both statistics. A KV head on several ranks is counted by its first holder only.
        parts = [(at_least_float32(q), self.q_norm, 1.0)]
        if k is not None:
            parts.append((at_least_float32(k), self.k_norm, float(self.plan.owns_kv(self.tensor_axis.rank))))
        squares = torch.cat([wide.square().sum((-2, -1)) * owned for wide, _, owned in parts], dim=1)
        # reduce: the sum is owed; copy: what comes back from each rank's own heads is owed a sum too.
        squares = copy(reduce(squares, self.tensor_axis), self.tensor_axis)
        normed: list[Tensor | None] = []
        for (wide, gain, _), total in zip(parts, squares.split([wide.shape[1] for wide, _, _ in parts], 1)):
            inverse = (total / gain.full_width + self.norm_eps).rsqrt().unsqueeze(-1).unsqueeze(-1)
            normed.append((wide * inverse * gain(wide.dtype)).to(q.dtype))
        return normed[0], normed[1] if k is not None else None

    def cache_shapes(self, rank: int | None = None) -> dict[str, tuple[int, ...]]:
        return {"k": (self.shared_heads(rank), self.head_dim), "v": (self.shared_heads(rank), self.v_head_dim)}
