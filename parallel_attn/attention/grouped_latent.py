"""Grouped latent attention (Zadouri, Strauss, Dao 2025): several latents, shared out over the ranks with their heads.

Shapes: B batch, S sequence, D model width, H query heads, n latent heads, C latent width, N / R / Ev nope / rope / value
head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parallel_attn.attention.config import refuse_touched
from parallel_attn.attention.given import Given, by_head, with_rope_key
from parallel_attn.attention.latent import LatentAttention, LatentConfig
from parallel_attn.nn.linear import HeadLinear, column_parallel
from parallel_attn.nn.norm import HeadGain, at_least_float32, rms_norm
from parallel_attn.sharding import HeadPlan


@dataclass
class GroupedLatentConfig(LatentConfig):
    num_latent_heads: int = 2


class GroupedLatentAttention(LatentAttention):
    """`num_latent_heads` latents of width `kv_lora_rank`, each up-projected to the keys and values of its own group of
    query heads; one rope key shared by all. Latents live on ranks as KV heads do, so the cache of a rank shrinks.

    Parameters (full shapes): queries as in MultiHeadLatentAttention; kv_a.weight (n C, D), kv_a_norm gain (n C,) with a gain
    for each latent, k_rope.weight (R, D), kv_b.weight (H (N + Ev), C), o.weight (D, H Ev). `bias=all`: q_a, kv_a, k_rope and o.
    Defaults in units of hidden_size / num_heads, rounded down: N 1, R 1/2, C 2, Ev N; n 2.
    """

    Config = GroupedLatentConfig
    latents_per_head_dim = 2

    def __init__(self, hidden_size: int, config: GroupedLatentConfig | None = None, **kwargs: Any) -> None:
        super().__init__(hidden_size, config, **kwargs)
        heads, latents, degree = self.config.num_heads, self.config.num_latent_heads, self.tensor_axis.degree
        self.plan = HeadPlan(heads, latents, degree, kv_key="num_latent_heads", kv_name="latent head")
        if self.q_latent_dim is None:
            only = "has no down projection to split or to keep whole without attention.q_lora_rank"
            refuse_touched(self.config, {"down_projection": only}, type(self).__name__)
        self.build_queries()
        bias = self.config.bias == "all"
        self.kv_a = self.column("kv_a", latents, self.plan.kv_heads, self.latent_dim, bias=bias)
        if self.config.latent_norm:
            self.kv_a_norm = HeadGain(self.placement.child("kv_a_norm"), self.latent_dim, latents, self.plan.kv_heads)
        if self.rope_dim:
            self.k_rope = self.shared_rope_key(self.rope_dim, bias=bias)
        self.kv_b = HeadLinear(
            self.placement.child("kv_b"),
            self.latent_dim,
            self.nope_dim + self.v_head_dim,
            heads,
            self.plan.query_heads,
        )
        self.build_output()

    def mix(self, x: Tensor, given: Given) -> Tensor:
        direct = self.q_latent_dim is None
        by_heads = [self.kv_a] + ([self.k_rope] if self.rope_dim else []) + ([self.q] if direct else []) + self.gates
        q_latent, (latents, *rest) = self.project(x, [] if direct else [self.q_a], by_heads)
        rope_key = [rest.pop(0)] if self.rope_dim else []
        if direct:
            q = rest.pop(0)
        else:
            q_latent = [self.q_a_norm(part) for part in q_latent] if self.config.latent_norm else q_latent
            (q,) = column_parallel(*self.head_local(q_latent), [self.q_b], summed=False)
        q, rope_key = self.queries(q, given), [self.turned_rope_key(part, given) for part in rope_key]
        latents = self.normed(by_head(latents, self.latent_dim))
        decoding = given.decoding(x.shape[1])
        if given.cache is not None:
            seen, *seen_key = given.seen(latents=latents, **({"rope_key": rope_key[0]} if rope_key else {}))
        if decoding:
            seen = with_rope_key(seen, *seen_key) if seen_key else seen
            return self.output(self.absorbed(q, seen, given), *rest or [None])
        return self.output(self.expanded(q, self.kv_b(latents), rope_key, given), *rest or [None])

    def normed(self, latents: Tensor) -> Tensor:
        """(B, S, n_local, C) after the latent norms, if any."""
        if not self.config.latent_norm:
            return latents
        wide = at_least_float32(latents)
        ones = wide.new_ones(self.latent_dim)
        return (rms_norm(wide, ones, self.config.latent_norm_eps) * self.kv_a_norm(wide.dtype)).to(latents.dtype)

    def cache_shapes(self, rank: int | None = None) -> dict[str, tuple[int, ...]]:
        rope_key = {"rope_key": (self.rope_dim,)} if self.rope_dim else {}
        return {"latents": (self.shared_heads(rank), self.latent_dim)} | rope_key
