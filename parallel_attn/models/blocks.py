"""Pre-norm blocks on a residual stream. Shapes: B batch, S sequence, T encoder tokens, D / M width of decoder / encoder.

An engine that shards or recomputes by block looks for `Block`: every kind of block is one.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from parallel_attn.attention import Attention, AttentionConfig, Cache, CrossAttention, CrossConfig
from parallel_attn.errors import SettingsError, keys_renamed
from parallel_attn.models.config import ModelConfig
from parallel_attn.nn import Placement, RMSNorm, ShardedModule, SwiGLU


class Block(ShardedModule):
    """x + attention(norm(x)), then + mlp(norm(.)): (B, S, D) -> (B, S, D), replicated over the tensor axis."""

    branches: ClassVar[int] = 2
    """What a block adds to the residual stream: attention and MLP."""

    def __init__(
        self,
        placement: Placement,
        model: ModelConfig,
        attention_class: type[Attention],
        attention: AttentionConfig,
    ) -> None:
        super().__init__(placement)
        self.attention_norm = self.new_norm("attention_norm", model)
        self.attention = self.new_attention("attention", attention_class, attention, model)
        self.mlp_norm = self.new_norm("mlp_norm", model)
        scale = self.output_scale(model)
        self.mlp = SwiGLU(placement.child("mlp"), model.hidden_size, model.mlp.hidden_size, output_scale=scale)

    def output_scale(self, model: ModelConfig) -> float:
        """Depth-scaled: the branches of all layers add up on the residual stream (Radford 2019, section 2.3)."""
        return (self.branches * model.num_layers) ** -0.5

    def new_norm(self, name: str, model: ModelConfig) -> RMSNorm:
        place = self.placement.child(name)
        return RMSNorm(place, model.hidden_size, eps=model.norm_eps, zero_centered=model.norm_zero_centered)

    def new_attention(self, name: str, kind: type[Attention], config: AttentionConfig, model: ModelConfig, **given):
        """A layer whose output can be added to the residual stream. Raises SettingsError for another width."""
        layer = kind(
            model.hidden_size,
            config,
            placement=self.placement.child(name),
            output_scale=self.output_scale(model),
            norm_eps=model.norm_eps,
            **given,
        )
        if layer.output_width != model.hidden_size:
            raise SettingsError(
                f"attention.output_projection=false gives {layer.output_width} = heads x v_head_dim where "
                f"model.hidden_size={model.hidden_size} is needed: set attention.v_head_dim, or true"
            )
        return layer

    def new_cache(self, batch: int, slots: int, **like: Any) -> Cache:
        """like: device, dtype."""
        return self.attention.new_cache(batch, slots, **like)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        """given: key_padding_mask, document_ids, samples, step, cache: see Attention.forward."""
        x = x + self.attention(self.attention_norm(x), **given)
        return x + self.mlp(self.mlp_norm(x))


class CrossBlock(Block):
    """A decoder block that reads an encoder: + cross_attention(norm(.), memory) between attention and MLP."""

    branches = 3

    def __init__(
        self,
        placement: Placement,
        model: ModelConfig,
        attention_class: type[Attention],
        attention: AttentionConfig,
        cross_attention: CrossConfig,
        memory_size: int,
    ) -> None:
        super().__init__(placement, model, attention_class, attention)
        self.cross_norm = self.new_norm("cross_norm", model)
        with keys_renamed({"attention.": "model.cross_attention."}):
            self.cross_attention = self.new_attention(
                "cross_attention", CrossAttention, cross_attention, model, memory_size=memory_size
            )

    def new_cache(self, batch: int, slots: int, *, context: int = 1, **like: Any) -> tuple[Cache, Cache]:
        """Of its own tokens and of `context` tokens of the encoder."""
        return super().new_cache(batch, slots, **like), self.cross_attention.new_cache(batch, context, **like)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        *,
        key_padding_mask: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        samples: Tensor | None = None,
        step: int | Tensor | None = None,
        cache: tuple[Cache, Cache] = (None, None),
    ) -> Tensor:
        """x (B, S, D), memory (B, T, M): the encoder's states, None where the cache has read them; masks (B, S) and (B, T)
        bool, True where a token is real."""
        dropout = {"samples": samples, "step": step}
        own, across = cache
        x = x + self.attention(self.attention_norm(x), key_padding_mask=key_padding_mask, cache=own, **dropout)
        reading = {"key_padding_mask": memory_padding_mask, "cache": across, **dropout}
        x = x + self.cross_attention(self.cross_norm(x), memory, **reading)
        return x + self.mlp(self.mlp_norm(x))
