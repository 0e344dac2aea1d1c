"""Decoder language model: pre-norm blocks of attention and SwiGLU on a residual stream.

Shapes: B batch, S sequence, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor, nn

from parallel_attn.attention.base import Attention
from parallel_attn.attention.config import AttentionConfig
from parallel_attn.collectives import gather
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup
from parallel_attn.nn import Placement, RMSNorm, ShardedModule, SwiGLU, VocabParallelEmbedding
from parallel_attn.nn import output_head, vocab_parallel_cross_entropy


@dataclass
class MlpConfig:
    hidden_size: int = 384


@dataclass
class ModelConfig:
    """Keys `model.<field>`; `vocab_size=None` is the tokenizer's."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 8
    mlp: MlpConfig = field(default_factory=MlpConfig)
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    norm_zero_centered: bool = False
    vocab_size: Optional[int] = None

    def check(self) -> None:
        for key in ("hidden_size", "num_layers", "num_heads"):
            if getattr(self, key) < 1:
                raise SettingsError(f"model.{key}={getattr(self, key)} must be at least 1")
        if self.mlp.hidden_size < 1:
            raise SettingsError(f"model.mlp.hidden_size={self.mlp.hidden_size} must be at least 1")
        if not 0 < self.norm_eps < math.inf:
            raise SettingsError(f"model.norm_eps={self.norm_eps} must be positive and finite")
        if self.vocab_size is not None and self.vocab_size < 2:
            raise SettingsError(f"model.vocab_size={self.vocab_size} must be at least 2, or null for the tokenizer's")


class Block(ShardedModule):
    """x + attention(norm(x)), then + mlp(norm(.)): (B, S, D) -> (B, S, D), replicated over the tensor axis."""

    def __init__(
        self,
        placement: Placement,
        model: ModelConfig,
        attention_class: type[Attention],
        attention: AttentionConfig,
    ) -> None:
        super().__init__(placement)
        # Depth-scaled: the two branches of L layers add up on the residual stream (Radford 2019, section 2.3).
        scale = (2 * model.num_layers) ** -0.5
        norm = {"eps": model.norm_eps, "zero_centered": model.norm_zero_centered}
        self.attention_norm = RMSNorm(placement.child("attention_norm"), model.hidden_size, **norm)
        self.attention = attention_class(
            model.hidden_size,
            attention,
            placement=placement.child("attention"),
            output_scale=scale,
            norm_eps=model.norm_eps,
        )
        if self.attention.output_width != model.hidden_size:
            raise SettingsError(
                f"attention.output_projection=false gives {self.attention.output_width} = heads x v_head_dim where "
                f"model.hidden_size={model.hidden_size} is needed: set attention.v_head_dim, or true"
            )
        self.mlp_norm = RMSNorm(placement.child("mlp_norm"), model.hidden_size, **norm)
        self.mlp = SwiGLU(placement.child("mlp"), model.hidden_size, model.mlp.hidden_size, output_scale=scale)

    def forward(self, x: Tensor, **given: Tensor | int | None) -> Tensor:
        """given: document_ids, samples, step: see Attention.forward."""
        x = x + self.attention(self.attention_norm(x), **given)
        return x + self.mlp(self.mlp_norm(x))


class DecoderLM(ShardedModule):
    """Causal language model.

    attention_class, attention: the type and its config, the same in every block.
    compute_dtype: dtype of the activations; None is the parameters'. fp32 parameters with bf16 compute are fp32 masters.
    seed: the initial weights are a function of (seed, full name), the same at every degree.

    Raises SettingsError for settings that cannot work.
    """

    def __init__(
        self,
        model: ModelConfig,
        attention_class: type[Attention],
        attention: AttentionConfig,
        *,
        tensor_parallel=None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        place = Placement(AxisGroup.of(tensor_parallel), "", seed, device, dtype)
        super().__init__(place)
        model.check()
        if model.vocab_size is None:
            raise SettingsError("model.vocab_size=null: a model built without a tokenizer needs the number of tokens")
        if attention_class.reads_memory:
            raise SettingsError(f"attention: {attention_class.__name__} reads an encoder's states: use model=encoder_decoder")
        if not attention.causal:
            raise SettingsError("attention.causal=false: a decoder language model would see its targets, use true")
        self.config, self.compute_dtype = model, compute_dtype
        self.embedding = VocabParallelEmbedding(place.child("embedding"), model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(
            Block(place.child(f"layers.{i}"), model, attention_class, attention) for i in range(model.num_layers)
        )
        self.norm = RMSNorm(
            place.child("norm"), model.hidden_size, eps=model.norm_eps, zero_centered=model.norm_zero_centered
        )
        self.head = output_head(
            place.child("head"),
            model.hidden_size,
            model.vocab_size,
            tied_to=self.embedding if model.tie_embeddings else None,
        )

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        samples: Tensor | None = None,
        step: int | Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """tokens (B, S) -> logits (B, S, V), whole on every rank; with targets (B, S): the *sum* of the losses in nats.

        document_ids, samples, step: as in Attention.forward (the last two for dropout). Targets of -100 count nothing. The sum divided by the number of valid targets is the mean; a sum can be split over
        micro batches and replicas without changing the total.
        """
        x = self.embedding(tokens)
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        for layer in self.layers:
            x = layer(x, document_ids=document_ids, samples=samples, step=step)
        logits = self.head(self.norm(x))
        if targets is None:
            return gather(logits, self.tensor_axis, -1, self.embedding.ranges)
        losses = vocab_parallel_cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            self.tensor_axis,
            self.embedding.ranges,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
        return losses.sum()

    @property
    def plan(self):
        """The HeadPlan of the attention layers."""
        return self.layers[0].attention.plan

    def cache_elements_per_token(self, rank: int | None = None) -> int:
        """Elements that tensor rank `rank` (default: this one) caches per token, all layers together."""
        return sum(layer.attention.cache_elements_per_token(rank) for layer in self.layers)
