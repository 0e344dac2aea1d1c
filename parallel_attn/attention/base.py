"""What every attention type shares: its settings, its place on the tensor axis, what stands between its projections and
its output, and what it must declare.

A new type is a subclass in a file of its own plus one YAML that names it. It declares its projections and how each is
sharded (by building them), its forward and its cache.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from parallel_attn.attention.caches import Cache, elements
from parallel_attn.attention.config import AttentionConfig, check_settings, resolved_config
from parallel_attn.attention.given import Given, without_padding
from parallel_attn.attention.kernels import attend
from parallel_attn.collectives import gather
from parallel_attn.errors import SettingsError
from parallel_attn.initialization import Dropout, constant, fan_in_normal
from parallel_attn.nn.linear import ColumnParallelLinear, RowParallelLinear
from parallel_attn.nn.module import Placement, ShardedModule
from parallel_attn.nn.rotary import Rotary
from parallel_attn.sharding import HeadPlan, scale_ranges


class Attention(ShardedModule, ABC):
    """Base of all attention types: x (B, S, D) replicated over the tensor axis -> (B, S, D) replicated, or
    (B, S, H Ev) with `output_projection=False`.

    hidden_size: D. config: the type's `Config`, or its fields as keywords.
    tensor_parallel: a DeviceMesh (one dim, or with a dim called "tensor"), a process group, or None for one rank.
    seed, name: the initial weights are a function of (seed, full name); without a name the layer gets a construction
    number, so that two layers never start identical.
    output_scale multiplies the initial std of the output projection; norm_eps belongs to the q/k norms.

    Settings that every type has: gate (Qiu 2025, G1: the heads' output times the sigmoid of a projection of x, for each
    element or one for each head), window, sinks, soft_cap, dropout, biases, output_projection.

    Raises SettingsError for settings that cannot work.
    """

    Config: ClassVar[type[AttentionConfig]] = AttentionConfig
    cannot_honour: ClassVar[dict[str, str]] = {}
    """Settings that must keep the default of this type's Config, each with the reason."""

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
        self.hidden_size = hidden_size
        self.config = resolved_config(self, config, settings)
        check_settings(self)
        if not 0 < norm_eps < math.inf:
            raise SettingsError(f"norm_eps={norm_eps} must be positive and finite")
        self.output_scale, self.norm_eps = output_scale, norm_eps
        self.head_dim, self.v_head_dim = self.head_widths()
        for key, width in (("head_dim", self.head_dim), ("v_head_dim", self.v_head_dim)):
            if width < 1:
                raise SettingsError(f"attention.{key}={width} must be at least 1")

    reads_memory: ClassVar[bool] = False
    """Whether keys and values come from another sequence: forward(x, memory)."""
    scales_scores: ClassVar[bool] = False
    """Whether the softmax scale takes YaRN's `score_factor`, as DeepSeek's does."""
    plan: HeadPlan
    """Which heads this type puts on which rank."""
    scale: float
    """What the products of queries and keys are multiplied with."""

    def head_widths(self) -> tuple[int, int]:
        """(E, Ev): widths of a query/key head and of a value head."""
        width = self.config.head_dim if self.config.head_dim is not None else self.even_share()
        return width, self.config.v_head_dim if self.config.v_head_dim is not None else width

    def even_share(self) -> int:
        """hidden_size / num_heads: the default width of a head. Raises SettingsError if that is no whole number."""
        heads = self.config.num_heads
        if heads < 1 or self.hidden_size % heads:
            raise SettingsError(
                f"attention.num_heads={heads} does not divide model.hidden_size={self.hidden_size}: "
                "set attention.head_dim"
            )
        return self.hidden_size // heads

    # ---- what subclasses build from -------------------------------------------------------------------------------

    def column(self, name: str, heads: int, ranges, width: int, *, inputs: int | None = None, bias: bool = False):
        """A projection by head: `inputs` (default D) -> heads * width, cut by `ranges` of heads."""
        rows = scale_ranges(ranges, width)
        return ColumnParallelLinear(
            self.placement.child(name), inputs or self.hidden_size, heads * width, rows, bias=bias
        )

    def build_output(self, *, gate_bias: bool = False) -> None:
        """Gate, sinks and output projection: all cut with this rank's query heads. Needs `self.plan`."""
        config, heads, query = self.config, self.config.num_heads, self.plan.query_heads
        self.gate = self.o = None
        if config.gate != "none":
            width = self.v_head_dim if config.gate == "elementwise" else 1
            self.gate = self.column("gate", heads, query, width, bias=gate_bias)
        if config.sinks:
            self.new_parameter("sinks", (heads,), constant(0.0), dim=0, ranges=query)
        if config.output_projection:
            self.o = RowParallelLinear(
                self.placement.child("o"),
                heads * self.v_head_dim,
                self.hidden_size,
                scale_ranges(query, self.v_head_dim),
                bias=config.bias == "all",
                initializer=fan_in_normal(self.output_scale),
            )

    @property
    def gates(self) -> list[ColumnParallelLinear]:
        """The gate's projection, if any: to be computed with what else reads x by heads."""
        return [] if self.gate is None else [self.gate]

    def rotary_of(self, width: int, *, fraction: float = 1.0) -> Rotary:
        """Rotary embedding of the first `fraction` of vectors of `width`, with this layer's rope settings."""
        rope, scaling = self.config.rope, self.config.rope.scaling
        if scaling is not None and scaling.mscale_all_dim is not None and not (scaling.mscale or self.scales_scores):
            raise SettingsError(
                f"attention.rope.scaling.mscale_all_dim={scaling.mscale_all_dim}: {type(self).__name__} reads it beside "
                f"mscale only (latent attention multiplies its scores with it); give both or none"
            )
        return Rotary(width, theta=rope.theta, fraction=fraction, style=rope.style, scaling=scaling)

    def shared_rope_key(self, width: int, *, bias: bool = False) -> ColumnParallelLinear:
        """The projection of a rope key that all heads share. Every rank holds it whole and uses it for its own heads
        only: copies, as of an MQA's key."""
        return self.column("k_rope", 1, ((0, 1),) * self.tensor_axis.degree, width, bias=bias)

    def turned_rope_key(self, rope_key: Tensor, given: Given) -> Tensor:
        """The shared rope key (B, S, R), turned."""
        return self.rotary(rope_key.unsqueeze(2), given.positions).squeeze(2)

    def core(self, q: Tensor, k: Tensor, v: Tensor, given: Given) -> Tensor:
        """q (B, S, H_local, E), k (B, T, K_local, E), v (B, T, K_local, Ev) -> (B, S, H_local, Ev)."""
        config = self.config
        return attend(
            q,
            k,
            v,
            scale=self.scale,
            causal=config.causal,
            window=config.window,
            sinks=self.sinks if config.sinks else None,
            soft_cap=config.soft_cap,
            dropout=self.dropout(given.samples, given.step),
            key_padding_mask=given.key_padding_mask,
            document_ids=given.document_ids,
        )

    def dropout(self, samples: Tensor | None, step: int | Tensor | None) -> Dropout | None:
        """The masks of this forward; None outside training. Raises ValueError when `samples` or `step` is not given."""
        if not self.config.dropout or not self.training:
            return None
        if samples is None or step is None:
            raise ValueError(
                f"attention.dropout={self.config.dropout} in training: forward needs samples (B,), the index of each sample "
                f"in the run, and step, so that the masks are the same at every degree and after a restart"
            )
        heads = self.plan.query_heads[self.tensor_axis.rank]
        return Dropout(self.config.dropout, self.placement.seed, self.placement.name, step, samples, heads)

    def output(self, heads: Tensor, gate: Tensor | None) -> Tensor:
        """heads (B, S, H_local, Ev), gate (B, S, H_local Ev or H_local) or None -> (B, S, D), replicated."""
        if gate is not None:
            width = self.v_head_dim if self.config.gate == "elementwise" else 1
            heads = heads * torch.sigmoid(gate).unflatten(-1, (-1, width))
        flat = heads.flatten(-2)
        if self.o is not None:
            return self.o(flat)
        return gather(flat, self.tensor_axis, -1, scale_ranges(self.plan.query_heads, self.v_head_dim))

    @property
    def output_width(self) -> int:
        return self.hidden_size if self.o is not None else self.config.num_heads * self.v_head_dim

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        samples: Tensor | None = None,
        step: int | Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """x (B, S, D) -> (B, S, D).

        positions (S,) or (B, S): default 0..S-1, with a cache those after the tokens in it. key_padding_mask (B, S) bool,
        True where a token is real: what padded slots hold, even a NaN, reaches no other slot and no gradient. document_ids
        (B, S): attention stays inside equal ids.
        samples (B,) int64, step: index of each sample in the run and the optimizer step, for dropout in training.
        cache: of `new_cache`; it takes these tokens, which see all that are in it. Padding belongs to the left of a row.

        Raises ValueError for dropout without samples and step, and for a cache that is full, or of another layer or batch.
        """
        given = Given(positions, key_padding_mask, document_ids, samples, step, cache)
        if cache is not None:
            self.prepare(cache, x, given)
        return self.mix(without_padding(x, key_padding_mask), given)

    def prepare(self, cache: Cache, x: Tensor, given: Given) -> None:
        """Checks that `cache` can take x, and gives the positions."""
        if not self.config.causal:
            raise ValueError("attention.causal=false: with a cache no token could see those after it")
        if given.document_ids is not None:
            raise ValueError("document_ids with a cache: one document is generated at a time, leave them out")
        if cache.owner is not self:
            cache.check_layer(self.cache_shapes(), self.config.window)
            cache.owner = self
        cache.check_room(x.shape[0], x.shape[1])
        if given.positions is None:
            given.positions = cache.span(x.shape[1], given.key_padding_mask)

    def new_cache(
        self, batch: int, slots: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Cache:
        """An empty cache for `batch` rows of up to `slots` tokens, by default with device and dtype of the weights."""
        like = next(self.parameters())
        given = {"device": device or like.device, "dtype": dtype or like.dtype}
        return Cache(self.cache_shapes(), batch, slots, window=self.config.window, **given)

    # ---- what a type declares --------------------------------------------------------------------------------------

    @abstractmethod
    def mix(self, x: Tensor, given: Given) -> Tensor:
        """The forward of a type: x (B, S, D), padded slots zeroed -> (B, S, D). Keys and values, or what they are made of,
        go through `given.seen`, then with the queries to `core`."""

    @abstractmethod
    def cache_shapes(self, rank: int | None = None) -> dict[str, tuple[int, ...]]:
        """What tensor rank `rank` (default: this one) caches of a token: (heads, width), or (width,), by name."""

    def cache_elements_per_token(self, rank: int | None = None) -> int:
        """Elements that tensor rank `rank` (default: this one) caches per token in generation."""
        return elements(self.cache_shapes(rank))

    def core_flops_per_token(self, context: int) -> int:
        """Forward FLOPs (2 per multiply-add) of scores and weighted sum for one query over `context` keys, all heads."""
        return 2 * self.config.num_heads * (self.head_dim + self.v_head_dim) * context

    def mean_keys(self, tokens: int, memory: int) -> float:
        """Keys that a query sees in the mean over `tokens` queries; memory: tokens of the sequence that cross attention
        reads. Masks that only the data know (padding, documents) are left out."""
        reach = min(self.config.window or tokens, tokens)
        back = reach * (reach + 1) / 2 + (tokens - reach) * reach  # query i sees min(i, reach) keys up to its own
        return (back if self.config.causal else 2 * back - tokens) / tokens

    def shared_heads(self, rank: int | None = None) -> int:
        """How many KV heads (latents, tied heads) tensor rank `rank` (default: this one) holds."""
        start, stop = self.plan.kv_heads[self.tensor_axis.rank if rank is None else rank]
        return stop - start
