"""Latent attention: keys and values of all heads are made from a small latent vector, which is what generation caches.

Multi-head latent attention (DeepSeek-V2, section 2.1, eq. 9 to 19), and what it shares with grouped_latent.py.

Shapes: B batch, S sequence, D model width, H query heads, C latent width, N / R / Ev nope / rope / value head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from parallel_attn.attention.base import Attention
from parallel_attn.attention.config import AttentionConfig, check_choice, refuse_touched
from parallel_attn.attention.given import Given, by_head, with_rope_key
from parallel_attn.collectives import all_gather_packed, copy
from parallel_attn.errors import SettingsError
from parallel_attn.nn.linear import ColumnParallelLinear, ReplicatedLinear, column_parallel
from parallel_attn.nn.norm import RMSNorm
from parallel_attn.sharding import HeadPlan, split_evenly


@dataclass
class LatentConfig(AttentionConfig):
    q_lora_rank: Optional[int] = None
    kv_lora_rank: Optional[int] = None
    qk_nope_head_dim: Optional[int] = None
    qk_rope_head_dim: Optional[int] = None
    latent_norm: bool = True
    latent_norm_eps: float = 1e-6
    down_projection: str = "auto"


_OWN_WIDTHS = "has the widths attention.qk_nope_head_dim and attention.qk_rope_head_dim"


class LatentAttention(Attention):
    """What latent types share: the widths, the query's path, the rope key, the core."""

    scales_scores = True
    latents_per_head_dim: int
    """Default latent width, in units of hidden_size / num_heads."""
    cannot_honour = {
        "head_dim": _OWN_WIDTHS,
        "qk_norm": "norms its latents instead (attention.latent_norm)",
        "qk_norm_zero_centered": "norms its latents instead (attention.latent_norm)",
        "rope.fraction": _OWN_WIDTHS,
    }

    def head_widths(self) -> tuple[int, int]:
        config = self.config
        check_choice("attention.down_projection", config.down_projection, ("auto", "sharded", "replicated"))
        check_choice("attention.bias", config.bias, ("none", "all"))  # its projections by head have none in any model

        def width(key: str, default: int) -> int:
            value = getattr(config, key)
            return default if value is None else value

        # No width has to be a part of D here: what does not divide is rounded down.
        unit = max(1, self.hidden_size // max(1, config.num_heads))
        self.nope_dim = width("qk_nope_head_dim", unit)
        self.rope_dim = width("qk_rope_head_dim", max(2, unit // 4 * 2))
        self.latent_dim = width("kv_lora_rank", self.latents_per_head_dim * unit)
        self.q_latent_dim = config.q_lora_rank
        if not 0 < config.latent_norm_eps < math.inf:
            raise SettingsError(f"attention.latent_norm_eps={config.latent_norm_eps} must be positive and finite")
        if not config.latent_norm:
            without = "has no latent norms with attention.latent_norm=false"
            refuse_touched(config, {"latent_norm_eps": without}, type(self).__name__)
        if self.latent_dim < 1:
            raise SettingsError(f"attention.kv_lora_rank={self.latent_dim} must be at least 1")
        if self.q_latent_dim is not None and self.q_latent_dim < 1:
            raise SettingsError(
                f"attention.q_lora_rank={self.q_latent_dim} must be at least 1, or null for no query latent"
            )
        if self.nope_dim < 0 or (self.nope_dim == 0 and self.rope_dim == 0):
            raise SettingsError(f"attention.qk_nope_head_dim={self.nope_dim} must be at least 1")
        if self.rope_dim < 0 or self.rope_dim % 2:
            raise SettingsError(
                f"attention.qk_rope_head_dim={self.rope_dim} must be even (rotary turns pairs), or 0 for no positions"
            )
        if self.rope_dim == 0 and config.rope.scaling is not None:
            raise SettingsError(
                f"attention.rope.scaling.type={config.rope.scaling.type} has nothing to scale at "
                f"attention.qk_rope_head_dim=0: use null"
            )
        value = config.v_head_dim if config.v_head_dim is not None else (self.nope_dim or self.rope_dim)
        return self.nope_dim + self.rope_dim, value

    @property
    def sharded(self) -> bool:
        """Whether the down projections are split over latent features."""
        return self.config.down_projection != "replicated"

    def build_queries(self) -> None:
        """Rotary, and the queries' projections: through a latent (q_a, q_a_norm, q_b) or at once (q)."""
        heads, query = self.config.num_heads, self.plan.query_heads
        self.rotary = self.rotary_of(self.rope_dim, fraction=float(self.rope_dim > 0))
        self.scale = self.head_dim**-0.5 * self.rotary.score_factor
        if self.q_latent_dim is None:
            self.q = self.column("q", heads, query, self.head_dim)
        else:
            self.q_a = self.down("q_a", self.q_latent_dim, "attention.q_lora_rank")
            if self.config.latent_norm:
                self.q_a_norm = self.norm("q_a_norm", self.q_latent_dim)
            self.q_b = self.column("q_b", heads, query, self.head_dim, inputs=self.q_latent_dim)

    def down(self, name: str, width: int, keys: str) -> ColumnParallelLinear | ReplicatedLinear:
        """A down projection D -> width: split over its features, or whole on every rank."""
        place, bias = self.placement.child(name), self.config.bias == "all"
        if not self.sharded:
            return ReplicatedLinear(place, self.hidden_size, width, bias=bias)
        ranges = split_evenly(width, self.tensor_axis.degree, what=keys)
        return ColumnParallelLinear(place, self.hidden_size, width, ranges, bias=bias)

    def norm(self, name: str, width: int) -> RMSNorm:
        # Sharded, the norm acts on a latent whose gradient is still partial: so is its gain's, which takes a `copy`.
        place, eps = self.placement.child(name), self.config.latent_norm_eps
        return RMSNorm(place, width, eps=eps, rank_local=self.sharded)

    def project(self, x: Tensor, down: list, by_heads: list[ColumnParallelLinear]) -> tuple[list[Tensor], list[Tensor]]:
        """x (B, S, D) -> whole outputs of the down projections, this rank's outputs of those by head.

        Sharded: one all-reduce of dx serves all, the slices of the latents are gathered, and the gather's backward is the
        sum that the latents owe. Replicated: the down projections read x before its `copy`; see `head_local`.
        """
        if self.sharded:
            outputs = column_parallel(x, [*down, *by_heads])
            slices, features = outputs[: len(down)], [layer.shards["weight"].ranges for layer in down]
            return all_gather_packed(slices, self.tensor_axis, features), list(outputs[len(down) :])
        return [layer(x) for layer in down], list(column_parallel(x, by_heads) if by_heads else [])

    def head_local(self, latents: list[Tensor]) -> list[Tensor]:
        """Normed latents and rope key (B, S, ...), where they become head-local: the one sum that all of them owe."""
        if self.sharded or not latents:
            return latents
        packed = copy(torch.cat(latents, dim=-1), self.tensor_axis)
        return list(packed.split([latent.shape[-1] for latent in latents], dim=-1))

    def queries(self, projected: Tensor, given: Given) -> Tensor:
        """(B, S, H_local (N + R)) -> (B, S, H_local, N + R), the rope part turned."""
        q = by_head(projected, self.head_dim)
        nope, rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        return torch.cat([nope, self.rotary(rope, given.positions)], dim=-1)

    def expanded(self, q: Tensor, nope_and_value: Tensor, rope_key: list[Tensor], given: Given) -> Tensor:
        """q (B, S, H_local, N + R), keys and values by head (B, S, H_local, N + Ev), [turned rope key (B, S, R)] or []
        -> (B, S, H_local, Ev)."""
        k, v = nope_and_value.split([self.nope_dim, self.v_head_dim], dim=-1)
        return self.core(q, with_rope_key(k, *rope_key) if rope_key else k, v, given)

    def absorbed(self, q: Tensor, latents: Tensor, given: Given) -> Tensor:
        """The same out of what is cached, without keys or values by head (DeepSeek-V2, section 2.1.2): the up projection
        of the keys goes into the queries, that of the values behind the sum.

        q (B, S, H_local, N + R), latents with the turned rope key (B, T, n_local, C + R) -> (B, S, H_local, Ev).
        """
        groups = (latents.shape[2], -1)
        up = self.kv_b.weight.to(q.dtype).unflatten(0, (*groups, self.nope_dim + self.v_head_dim))
        to_key, to_value = up.split([self.nope_dim, self.v_head_dim], dim=2)
        nope, rope = q.unflatten(2, groups).split([self.nope_dim, self.rope_dim], dim=-1)
        q = torch.cat([torch.einsum("bsngd,ngdc->bsngc", nope, to_key), rope], dim=-1).flatten(2, 3)
        # Latent and rope key serve as the values, too, so that nothing is copied; the rope's part of the sum is dropped.
        summed = self.core(q, latents, latents, given)[..., : self.latent_dim].unflatten(2, groups)
        return torch.einsum("bsngc,ngvc->bsngv", summed, to_value).flatten(2, 3)


class MultiHeadLatentAttention(LatentAttention):
    """DeepSeek-V2/V3: one latent for keys and values, one rope key shared by all heads.

    kv_a: x -> [latent C | rope key R]; kv_b: norm(latent) -> H x [nope key N | value Ev]; queries from x (q) or from a
    latent of their own (q_a, norm, q_b) of width `q_lora_rank`. Softmax scale (N + R) ** -0.5, times YaRN's mscale squared.

    Parameters (full shapes): q.weight (H (N + R), D), or q_a.weight (q_lora_rank, D), q_a_norm gain, q_b.weight
    (H (N + R), q_lora_rank); kv_a.weight (C + R, D), kv_a_norm gain (C,), kv_b.weight (H (N + Ev), C), o.weight (D, H Ev).
    `bias=all`: q_a, kv_a and o. `qk_rope_head_dim=0`: the plain latent form, without positions.
    Defaults in units of hidden_size / num_heads, rounded down: N 1, R 1/2, C 4, Ev N.
    """

    Config = LatentConfig
    latents_per_head_dim = 4

    def __init__(self, hidden_size: int, config: LatentConfig | None = None, **kwargs: Any) -> None:
        super().__init__(hidden_size, config, **kwargs)
        heads = self.config.num_heads
        # Every rank works on the one latent and caches it whole, as MQA its one KV head.
        self.plan = HeadPlan(heads, 1, self.tensor_axis.degree, kv_name="latent")
        self.build_queries()
        self.kv_a = self.down(
            "kv_a", self.latent_dim + self.rope_dim, "attention.kv_lora_rank + attention.qk_rope_head_dim"
        )
        if self.config.latent_norm:
            self.kv_a_norm = self.norm("kv_a_norm", self.latent_dim)
        self.kv_b = self.column(
            "kv_b", heads, self.plan.query_heads, self.nope_dim + self.v_head_dim, inputs=self.latent_dim
        )
        self.build_output()

    def mix(self, x: Tensor, given: Given) -> Tensor:
        direct = self.q_latent_dim is None
        down = [self.kv_a] if direct else [self.kv_a, self.q_a]
        (kv, *q_latent), by_heads = self.project(x, down, ([self.q] if direct else []) + self.gates)
        latent, *rope_key = kv.split([self.latent_dim, self.rope_dim] if self.rope_dim else [self.latent_dim], dim=-1)
        if self.config.latent_norm:
            latent, q_latent = self.kv_a_norm(latent), [self.q_a_norm(part) for part in q_latent]
        latent, *rest = self.head_local([latent, *q_latent, *rope_key])
        if direct:
            q = by_heads.pop(0)
        else:
            (q,) = column_parallel(rest.pop(0), [self.q_b], summed=False)
        q, rope_key = self.queries(q, given), [self.turned_rope_key(part, given) for part in rest]
        decoding = given.decoding(x.shape[1])
        if given.cache is not None:
            (seen,) = given.seen(latent=torch.cat([latent, *rope_key], dim=-1))
        if decoding:
            return self.output(self.absorbed(q, seen.unsqueeze(2), given), *by_heads or [None])
        (kv,) = column_parallel(latent, [self.kv_b], summed=False)
        kv = by_head(kv, self.nope_dim + self.v_head_dim)
        return self.output(self.expanded(q, kv, rope_key, given), *by_heads or [None])

    def cache_shapes(self, rank: int | None = None) -> dict[str, tuple[int, ...]]:
        return {"latent": (self.latent_dim + self.rope_dim,)}
