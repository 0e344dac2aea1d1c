"""Decoder language model: blocks of attention and SwiGLU. Shapes: B batch, S sequence, V vocabulary."""

from __future__ import annotations

from torch import Tensor

from parallel_attn.models.base import LanguageModel


class DecoderLM(LanguageModel):
    """Causal language model."""

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
        """tokens (B, S) -> logits (B, S, V), whole on every rank; with targets (B, S): as LanguageModel.forward."""
        given = {"document_ids": document_ids, "samples": samples, "step": step}
        return self.decoded(tokens, targets, given, label_smoothing=label_smoothing, z_loss=z_loss)
