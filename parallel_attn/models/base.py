"""What every language model here has: embedding, a stack of blocks, final norm, output head, and the loss.

Shapes: B batch, S sequence, D model width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from parallel_attn.attention import Attention, AttentionConfig
from parallel_attn.collectives import gather
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup
from parallel_attn.models.blocks import Block
from parallel_attn.models.cache import ModelCache
from parallel_attn.models.config import ModelConfig
from parallel_attn.nn import Placement, RMSNorm, ShardedModule, VocabParallelEmbedding
from parallel_attn.nn import output_head, vocab_parallel_cross_entropy
from parallel_attn.sharding import HeadPlan


class LanguageModel(ShardedModule, ABC):
    """Base of the models: tokens and targets in, a sum of losses (or logits) out.

    attention_class, attention: the type and its config, the same in every block.
    compute_dtype: dtype of the activations; None is the parameters'. fp32 parameters with bf16 compute are fp32 masters.
    seed: the initial weights are a function of (seed, full name), the same at every degree.

    Raises SettingsError for settings that cannot work.
    """

    Config: ClassVar[type[ModelConfig]] = ModelConfig

    def __init__(
        self,
        model: ModelConfig,
        attention_class: type[Attention],
        attention: AttentionConfig,
        *,
        tensor_parallel: Any = None,
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
            raise SettingsError(f"attention: {attention_class.__name__} reads an encoder's states: {self.cross_hint}")
        if not attention.causal:
            raise SettingsError("attention.causal=false: a decoder language model would see its targets, use true")
        self.config, self.compute_dtype = model, compute_dtype
        self.embedding = VocabParallelEmbedding(place.child("embedding"), model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(
            self.new_block(place.child(f"layers.{i}"), attention_class, attention) for i in range(model.num_layers)
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

    cross_hint: ClassVar[str] = "use model=encoder_decoder"
    """Where cross attention belongs, for who has chosen it for this model's own tokens."""

    def new_block(self, placement: Placement, attention_class: type[Attention], attention: AttentionConfig) -> Block:
        return Block(placement, self.config, attention_class, attention)

    @abstractmethod
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
        """tokens (B, S), targets (B, S) -> the *sum* of the losses in nats; without targets the logits (B, S, V).

        document_ids, samples, step: as in Attention.forward (the last two for dropout). Targets of -100 count nothing.
        The sum divided by the number of valid targets is the mean; a sum can be split over micro batches and replicas
        without changing the total.
        """

    def embedded(self, embedding: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
        """tokens (B, S) -> (B, S, D) in the compute dtype."""
        x = embedding(tokens)
        return x if self.compute_dtype is None else x.to(self.compute_dtype)

    def decoded(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        given: dict[str, Any],
        *,
        label_smoothing: float,
        z_loss: float,
        cache: ModelCache | None,
        last: bool,
    ) -> Tensor:
        """Embedding, blocks (which take `given`, and each its part of `cache`), norm and head: logits (B, S, V), those of
        the last token only (B, 1, V) where `last`, or with targets the summed loss."""
        x = self.embedded(self.embedding, tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, **given) if cache is None else layer(x, cache=cache.layers[i], **given)
        if last:
            x = x[:, -1:]
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

    # ---- generation -----------------------------------------------------------------------------------------------

    def new_cache(self, batch: int, slots: int, **context: int) -> ModelCache:
        """An empty cache for `batch` rows of up to `slots` tokens, in the compute dtype; context: of blocks that have one."""
        weight = self.embedding.weight
        like = {"device": weight.device, "dtype": self.compute_dtype or weight.dtype}
        return ModelCache([layer.new_cache(batch, slots, **context, **like) for layer in self.layers])

    @abstractmethod
    def prefill(
        self, tokens: Tensor, *, slots: int, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, ModelCache]:
        """Reads prompts: tokens (B, P) -> logits of the last token of each (B, V), whole on every rank, and a cache that
        holds them, with room for `slots` tokens in all.

        key_padding_mask (B, P) bool, False where a row is filled up, on its left. Raises SettingsError for a prompt that
        the model cannot take, ValueError for more tokens than slots.
        """

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: ModelCache) -> Tensor:
        """The next tokens (B, S) of all rows -> logits of each (B, S, V), whole on every rank; `cache` takes them.

        Raises ValueError when the cache is full, and for another batch.
        """
        return self(tokens, cache=cache)

    def most_tokens(self, prompt: int, seq_len: int) -> int:
        """How many tokens a prompt of that many tokens and its continuation can have, for a model of `seq_len` tokens.

        Raises SettingsError for a prompt that the model cannot take.
        """
        if prompt < 1:
            raise SettingsError("prompt: it has no token, a model needs one to go on from")
        return seq_len

    # ---- what it declares -----------------------------------------------------------------------------------------

    @property
    def plan(self) -> HeadPlan:
        """The HeadPlan of the attention layers."""
        return self.layers[0].attention.plan

    @property
    def plans(self) -> dict[str, HeadPlan]:
        """The HeadPlan of each kind of attention layer, by what a table calls it."""
        return {"attention": self.plan}

    def context_tokens(self, seq_len: int) -> int:
        """How many tokens of a sample are read as context only, from the first on: their targets do not count."""
        return self.config.context_tokens(seq_len)

    def tokens_through(self, seq_len: int) -> Iterator[tuple[nn.Module, int]]:
        """(part, tokens of a sample of `seq_len` that pass through it), a part inside another after it."""
        yield self, seq_len

    def cache_elements_per_token(self, rank: int | None = None) -> int:
        """Elements that tensor rank `rank` (default: this one) caches per generated token, all layers together."""
        return sum(layer.attention.cache_elements_per_token(rank) for layer in self.layers)
