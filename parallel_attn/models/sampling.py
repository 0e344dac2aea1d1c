"""The next token out of logits: greedy, or drawn with a temperature from the likeliest tokens.

Randomness is counter-based: a draw is a function of (seed, number of the prompt, position), so the same tokens come out
at every degree, in every batch and on every rank, and nothing is carried from call to call.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_attn.errors import SettingsError


@dataclass(frozen=True)
class Sampling:
    """temperature: what logits are divided by; 0: greedy, the likeliest token. top_k: only so many likeliest tokens; 0: all.
    top_p: only the fewest likeliest tokens whose probabilities reach it (Holtzman 2020, "nucleus"); 1: all.

    Raises SettingsError for values that cannot be.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise SettingsError(f"temperature={self.temperature} must be 0 (greedy) or more, and finite")
        if self.top_k < 0:
            raise SettingsError(f"top_k={self.top_k} must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p={self.top_p} must be above 0 and at most 1 (all tokens)")

    def check_vocabulary(self, tokens: int) -> None:
        """Raises SettingsError for a top_k above the number of tokens."""
        if self.top_k > tokens:
            raise SettingsError(f"top_k={self.top_k} is above the vocabulary of {tokens}: use at most {tokens}, or 0 for all")

    def pick(self, logits: Tensor, numbers: Sequence[int], position: int) -> Tensor:
        """logits (B, V) -> tokens (B,) int64. numbers: of the prompts; position: tokens drawn before.

        The likeliest is found where the logits are; a draw is made, and stays, on the CPU.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        wide = logits.detach().to("cpu", torch.float64)
        wide = (wide - wide.amax(-1, keepdim=True)) / self.temperature  # at most 0: nothing overflows, however cold
        tokens = None
        if self.top_k or self.top_p < 1:
            wide, tokens = wide.topk(self.top_k or wide.shape[-1], dim=-1)  # sorted, the likeliest first
        weights = torch.softmax(wide, dim=-1)
        if self.top_p < 1:
            before = weights.cumsum(-1) - weights
            weights = weights.masked_fill(before >= self.top_p, 0)
        reached = weights.cumsum(-1)
        drawn = torch.tensor([[uniform(self.seed, number, position)] for number in numbers], dtype=torch.float64)
        # The first token whose share of the whole reaches beyond the draw: never one of weight zero.
        index = torch.searchsorted(reached, drawn * reached[:, -1:], right=True).clamp_(max=wide.shape[-1] - 1)
        picked = index if tokens is None else tokens.gather(-1, index)
        return picked.squeeze(-1)


def uniform(seed: int, number: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments."""
    digest = hashlib.blake2b(f"{seed} {number} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
