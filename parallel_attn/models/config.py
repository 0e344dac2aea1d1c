"""The settings of the models: keys `model.<field>`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional

from parallel_attn.attention import Attention, CrossAttention, CrossConfig
from parallel_attn.errors import SettingsError


@dataclass
class MlpConfig:
    hidden_size: int = 384


@dataclass
class ModelConfig:
    """Of a decoder language model; `vocab_size=None` is the tokenizer's."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 8
    mlp: MlpConfig = field(default_factory=MlpConfig)
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    norm_zero_centered: bool = False
    vocab_size: Optional[int] = None

    def check(self) -> None:
        """Raises SettingsError for values that no model can have."""
        for key in ("hidden_size", "num_layers", "num_heads"):
            _at_least_one(f"model.{key}", getattr(self, key))
        _at_least_one("model.mlp.hidden_size", self.mlp.hidden_size)
        if not 0 < self.norm_eps < math.inf:
            raise SettingsError(f"model.norm_eps={self.norm_eps} must be positive and finite")
        if self.vocab_size is not None and self.vocab_size < 2:
            raise SettingsError(f"model.vocab_size={self.vocab_size} must be at least 2, or null for the tokenizer's")

    def check_data(self, seq_len: int, documents: bool) -> None:
        """Raises SettingsError for samples (of `seq_len` tokens, attention kept inside documents) it cannot train on."""

    def context_tokens(self, seq_len: int) -> int:
        """How many of a sample's tokens are read as context only: from the first on, without a target."""
        return 0


@dataclass
class EncoderMlpConfig:
    hidden_size: Optional[int] = None


@dataclass
class EncoderConfig:
    """Keys `model.encoder.<field>`. None: the model's width and layers; the model's MLP, scaled with the width; half of
    the sample."""

    hidden_size: Optional[int] = None
    num_layers: Optional[int] = None
    mlp: EncoderMlpConfig = field(default_factory=EncoderMlpConfig)
    seq_len: Optional[int] = None


@dataclass
class EncoderDecoderConfig(ModelConfig):
    """The decoder's settings as in ModelConfig; `cross_attention=None`: CrossConfig with the model's heads.

    In a configuration file `cross_attention` is a choice of the attention group, put into its cross form.
    """

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    cross_attention: Optional[CrossConfig] = field(
        default=None, metadata={"group": "attention", "base": Attention, "as": CrossAttention.config_from}
    )

    def check(self) -> None:
        super().check()
        for key in ("hidden_size", "num_layers", "seq_len"):
            _at_least_one(f"model.encoder.{key}", getattr(self.encoder, key))
        _at_least_one("model.encoder.mlp.hidden_size", self.encoder.mlp.hidden_size)

    def check_data(self, seq_len: int, documents: bool) -> None:
        self.context_tokens(seq_len)
        if documents:
            raise SettingsError(
                "data.documents=true with model=encoder_decoder: a document may begin in the encoder's part of a sample "
                "and end in the decoder's; use false"
            )

    def context_tokens(self, seq_len: int) -> int:
        """The encoder's part. Raises SettingsError when it leaves the encoder or the decoder without any token."""
        wanted = self.encoder.seq_len
        if seq_len < 2:
            raise SettingsError(f"train.seq_len={seq_len}: encoder and decoder need a token each, use 2 or more")
        if wanted is not None and not 1 <= wanted < seq_len:
            raise SettingsError(
                f"model.encoder.seq_len={wanted} leaves the decoder nothing of train.seq_len={seq_len}: "
                f"use 1 to {seq_len - 1}, or null for half"
            )
        return seq_len // 2 if wanted is None else wanted

    def encoder_model(self) -> ModelConfig:
        """The encoder's stack of blocks, as the settings of a model of its own."""
        encoder = self.encoder
        width = encoder.hidden_size or self.hidden_size
        mlp = encoder.mlp.hidden_size or max(1, round(self.mlp.hidden_size * width / self.hidden_size))
        return ModelConfig(
            hidden_size=width,
            num_layers=encoder.num_layers or self.num_layers,
            num_heads=self.num_heads,
            mlp=MlpConfig(mlp),
            norm_eps=self.norm_eps,
            norm_zero_centered=self.norm_zero_centered,
            vocab_size=self.vocab_size,
        )


def _at_least_one(key: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise SettingsError(f"{key}={value} must be at least 1")
