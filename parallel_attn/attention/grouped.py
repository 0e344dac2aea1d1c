"""Grouped-query attention (Ainslie 2023). MHA (Vaswani 2017) and MQA (Shazeer 2019) are the same class with
`num_kv_heads` equal to `num_heads` or to 1.

Shapes: B batch, S sequence, D model width, H/K query/KV heads, E head width, Ev value head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from parallel_attn.attention.base import Attention, AttentionConfig
from parallel_attn.attention.kernels import attend
from parallel_attn.collectives import copy, reduce
from parallel_attn.initialization import constant, fan_in_normal
from parallel_attn.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallel_attn.nn.module import Placement, ShardedModule
from parallel_attn.nn.norm import RMSNorm, at_least_float32
from parallel_attn.nn.rotary import Rotary
from parallel_attn.sharding import HeadPlan, scale_ranges


@dataclass
class GroupedConfig(AttentionConfig):
    num_kv_heads: Optional[int] = None


def default_kv_heads(num_heads: int) -> int:
    """A quarter of the query heads, rounded to the nearest divisor of them that is at least 2 (1 for a single head)."""
    divisors = [d for d in range(1, num_heads + 1) if num_heads % d == 0 and (d >= 2 or num_heads == 1)]
    return min(divisors, key=lambda d: abs(d - num_heads / 4)) if divisors else 1


class GroupedQueryAttention(Attention):
    """K KV heads, each shared by a group of H / K query heads; `num_kv_heads=None` is a quarter of H.

    Parameters (full shapes): q.weight (H E, D), k.weight (K E, D), v.weight (K Ev, D), o.weight (D, H Ev); biases of
    q, k, v with `bias=qkv`, of o too with `bias=all`; q_norm, k_norm gains (E,) with `qk_norm=head`, (H E,) and (K E,)
    with `qk_norm=full`. The norms act before rotary. Softmax scale E ** -0.5.
    """

    Config = GroupedConfig

    def __init__(self, hidden_size: int, config: GroupedConfig | None = None, **kwargs: Any) -> None:
        super().__init__(hidden_size, config, **kwargs)
        config, place, axis = self.config, self.placement, self.tensor_axis
        kv_heads = config.num_kv_heads if config.num_kv_heads is not None else default_kv_heads(config.num_heads)
        self.plan = HeadPlan(config.num_heads, kv_heads, axis.degree)
        self.scale = self.head_dim**-0.5
        query, kv = self.plan.query_heads, self.plan.kv_heads

        def column(name: str, heads: int, ranges, width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                place.child(name), hidden_size, heads * width, scale_ranges(ranges, width), bias=config.bias != "none"
            )

        self.q = column("q", config.num_heads, query, self.head_dim)
        self.k = column("k", kv_heads, kv, self.head_dim)
        self.v = column("v", kv_heads, kv, self.v_head_dim)
        self.o = RowParallelLinear(
            place.child("o"),
            config.num_heads * self.v_head_dim,
            hidden_size,
            scale_ranges(query, self.v_head_dim),
            bias=config.bias == "all",
            initializer=fan_in_normal(self.output_scale),
        )
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
                FullWidthGain(place.child(name), self.head_dim, heads, ranges, zero_centered=zero_centered)
                for name, heads, ranges in (("q_norm", config.num_heads, query), ("k_norm", kv_heads, kv))
            )
        self.rotary = Rotary.of(self.head_dim, config.rope)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        if key_padding_mask is not None:
            # Zeroed here, a padded slot cannot leak through 0 * NaN, neither forward nor into a weight gradient.
            x = x.masked_fill(~key_padding_mask.unsqueeze(-1), 0)
        q, k, v = column_parallel(x, [self.q, self.k, self.v])
        q = q.unflatten(-1, (-1, self.head_dim))
        k = k.unflatten(-1, (-1, self.head_dim))
        v = v.unflatten(-1, (-1, self.v_head_dim))
        q, k = self.normalized(q, k)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        out = attend(
            q,
            k,
            v,
            scale=self.scale,
            causal=self.config.causal,
            key_padding_mask=key_padding_mask,
            document_ids=document_ids,
        )
        return self.o(out.flatten(-2))

    def normalized(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q (B, S, H_local, E), k (B, S, K_local, E) after the q/k norms, if any."""
        if self.config.qk_norm == "none":
            return q, k
        if self.config.qk_norm == "head":
            return self.q_norm(q), self.k_norm(k)
        wide_q, wide_k = at_least_float32(q), at_least_float32(k)
        # One sum over the axis for both statistics. A KV head on several ranks is counted by its first holder only.
        owned = float(self.plan.owns_kv(self.tensor_axis.rank))
        squares = torch.stack([wide_q.square().sum((-2, -1)), wide_k.square().sum((-2, -1)) * owned])
        # reduce: the sum is owed; copy: what comes back from each rank's own heads is owed a sum too.
        squares = copy(reduce(squares, self.tensor_axis), self.tensor_axis)
        widths = squares.new_tensor([self.q_norm.full_width, self.k_norm.full_width])
        inverse = (squares / widths.view(2, 1, 1) + self.norm_eps).rsqrt().unsqueeze(-1).unsqueeze(-1)
        return (
            (wide_q * inverse[0] * self.q_norm(wide_q.dtype)).to(q.dtype),
            (wide_k * inverse[1] * self.k_norm(wide_k.dtype)).to(k.dtype),
        )

    def cache_elements_per_token(self, rank: int | None = None) -> int:
        start, stop = self.plan.kv_heads[self.tensor_axis.rank if rank is None else rank]
        return (stop - start) * (self.head_dim + self.v_head_dim)

    def core_flops_per_token(self, context: int) -> int:
        return 2 * self.config.num_heads * (self.head_dim + self.v_head_dim) * context


class FullWidthGain(ShardedModule):
    """The gain of an RMSNorm over all heads together: (heads * E,), cut with its heads.

    The gain of a KV head on several ranks passes through a `copy` over them.
    """

    def __init__(self, placement: Placement, head_dim: int, heads: int, ranges, *, zero_centered: bool) -> None:
        super().__init__(placement)
        self.head_dim, self.full_width, self.zero_centered = head_dim, heads * head_dim, zero_centered
        self.new_parameter(
            "weight",
            (heads * head_dim,),
            constant(0.0 if zero_centered else 1.0),
            dim=0,
            ranges=scale_ranges(ranges, head_dim),
        )
        self.copies = self.tensor_axis.subgroup(self.shards["weight"].holders)

    def forward(self, dtype: torch.dtype) -> Tensor:
        """The multiplier of this rank's heads (heads_local, E) in `dtype`."""
        gain = copy(self.weight, self.copies).to(dtype).unflatten(0, (-1, self.head_dim))
        return gain + 1 if self.zero_centered else gain
