"""Decoder language model: blocks of attention and SwiGLU. Shapes: B batch, S sequence, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_attn.models.base import LanguageModel
from parallel_attn.models.cache import ModelCache


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
        key_padding_mask: Tensor | None = None,
        cache: ModelCache | None = None,
        last: bool = False,
    ) -> Tensor:
        """tokens (B, S) -> logits (B, S, V), whole on every rank; with targets (B, S): as LanguageModel.forward.

        key_padding_mask (B, S) bool, True where a token is real. cache: of `new_cache`; the tokens come after those in it.
        last: logits of the last token only (B, 1, V).
        """
        given = {"key_padding_mask": key_padding_mask, "document_ids": document_ids, "samples": samples, "step": step}
        loss = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        return self.decoded(tokens, targets, given, **loss, cache=cache, last=last)

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, *, slots: int, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, ModelCache]:
        cache = self.new_cache(tokens.shape[0], slots)
        return self(tokens, key_padding_mask=key_padding_mask, cache=cache, last=True)[:, 0], cache
