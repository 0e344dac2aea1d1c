"""Encoder-decoder language model (Vaswani 2017): the encoder reads the first part of a sample, the decoder writes on.

Shapes: B batch, S tokens of a sample, T those of the encoder, M its width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from parallel_attn.attention import Attention, AttentionConfig, CrossConfig
from parallel_attn.attention.given import without_padding
from parallel_attn.errors import SettingsError, keys_renamed
from parallel_attn.models.base import LanguageModel
from parallel_attn.models.blocks import Block, CrossBlock
from parallel_attn.models.cache import ModelCache
from parallel_attn.models.config import EncoderDecoderConfig, ModelConfig
from parallel_attn.nn import Placement, RMSNorm, ShardedModule, VocabParallelEmbedding
from parallel_attn.sharding import HeadPlan

_KEYS = {"model.hidden_size": "model.encoder.hidden_size", "model.mlp.": "model.encoder.mlp."}


class Encoder(ShardedModule):
    """Blocks whose attention sees the whole context, and a final norm: embedded tokens (B, T, M) -> states (B, T, M)."""

    def __init__(
        self, placement: Placement, model: ModelConfig, attention_class: type[Attention], attention: AttentionConfig
    ) -> None:
        super().__init__(placement)
        self.embedding = VocabParallelEmbedding(placement.child("embedding"), model.vocab_size, model.hidden_size)
        with keys_renamed(_KEYS):
            self.layers = nn.ModuleList(
                Block(placement.child(f"layers.{i}"), model, attention_class, replace(attention, causal=False))
                for i in range(model.num_layers)
            )
        self.norm = RMSNorm(
            placement.child("norm"), model.hidden_size, eps=model.norm_eps, zero_centered=model.norm_zero_centered
        )

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None, **given: Tensor | int | None) -> Tensor:
        """key_padding_mask (B, T) bool, True where a token is real; given: samples, step: see Attention.forward."""
        x = without_padding(x, key_padding_mask)
        for layer in self.layers:
            x = layer(x, key_padding_mask=key_padding_mask, **given)
        return self.norm(x)


class EncoderDecoderLM(LanguageModel):
    """A decoder whose blocks also read, by cross attention, the states of an encoder of its own width and depth.

    Of a sample's S tokens the first `context_tokens(S)` go to the encoder, which has an embedding of its own; the
    decoder sees the others, counts their positions from 0, and predicts the token after each of them.
    """

    Config = EncoderDecoderConfig
    cross_hint = "here it is model.cross_attention, choose a type of self attention"

    def __init__(self, model: EncoderDecoderConfig, attention_class, attention, **given) -> None:
        super().__init__(model, attention_class, attention, **given)
        place = self.placement.child("encoder")
        self.encoder = Encoder(place, model.encoder_model(), attention_class, attention)

    def new_block(self, placement: Placement, attention_class: type[Attention], attention: AttentionConfig) -> Block:
        model = self.config
        cross = model.cross_attention or CrossConfig(num_heads=model.num_heads)
        return CrossBlock(placement, model, attention_class, attention, cross, model.encoder_model().hidden_size)

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
        encoder_padding_mask: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """tokens (B, S) -> logits (B, S - T, V), whole on every rank; with targets (B, S): as LanguageModel.forward, those
        of the encoder's tokens count nothing.

        encoder_padding_mask (B, T) bool, True where a token of the encoder is real: what the others hold reaches nothing.
        cache: of `prefill`; then all tokens (B, S) are the decoder's, after those in it -> logits (B, S, V).
        Raises SettingsError for document_ids, and where S leaves the encoder or the decoder without any token.
        """
        loss = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        if cache is not None:
            return self.decoded(tokens, targets, {"memory": None}, **loss, cache=cache, last=False)
        if document_ids is not None:
            self.config.check_data(tokens.shape[1], documents=True)
        context = self.context_tokens(tokens.shape[1])
        dropout = {"samples": samples, "step": step}
        read = self.embedded(self.encoder.embedding, tokens[:, :context])
        memory = self.encoder(read, key_padding_mask=encoder_padding_mask, **dropout)
        return self.decoded(
            tokens[:, context:],
            None if targets is None else targets[:, context:],
            {"memory": memory, "memory_padding_mask": encoder_padding_mask, **dropout},
            **loss,
            cache=None,
            last=False,
        )

    # ---- generation: the encoder reads a prompt up to its last token, the decoder goes on from that one ----------------

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, *, slots: int, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, ModelCache]:
        context = tokens.shape[1] - 1
        mask = None if key_padding_mask is None else key_padding_mask[:, :-1]
        if context < 1 or (mask is not None and not mask.any(1).all()):
            raise SettingsError("prompt: a prompt of one token leaves the encoder nothing to read, give two or more")
        memory = self.encoder(self.embedded(self.encoder.embedding, tokens[:, :-1]), key_padding_mask=mask)
        cache = self.new_cache(tokens.shape[0], max(1, slots - context), context=context)
        given = {"memory": memory, "memory_padding_mask": mask}
        loss = {"label_smoothing": 0.0, "z_loss": 0.0}
        return self.decoded(tokens[:, -1:], None, given, **loss, cache=cache, last=True)[:, 0], cache

    def most_tokens(self, prompt: int, seq_len: int) -> int:
        context = self.context_tokens(seq_len)
        if not 2 <= prompt <= context + 1:
            raise SettingsError(
                f"prompt: it has {prompt} tokens; the encoder reads all but the last, 1 to {context}: give 2 to {context + 1}"
            )
        return prompt - 1 + seq_len - context

    @property
    def plans(self) -> dict[str, HeadPlan]:
        return super().plans | {"cross attention": self.layers[0].cross_attention.plan}

    def tokens_through(self, seq_len: int) -> Iterator[tuple[nn.Module, int]]:
        context = self.context_tokens(seq_len)
        yield self, seq_len - context
        yield self.encoder, context
        for layer in self.layers:
            for reader in layer.cross_attention.memory_readers:
                yield reader, context

    def context_cache_elements_per_token(self, rank: int | None = None) -> int:
        """Elements that tensor rank `rank` (default: this one) caches per token of the encoder: keys and values of the
        cross attention, which do not grow while the decoder writes."""
        return sum(layer.cross_attention.cache_elements_per_token(rank) for layer in self.layers)
