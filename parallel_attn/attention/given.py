"""What stands beside x on its way through an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_attn.attention.caches import Cache
from parallel_attn.nn.rotary import Span


@dataclass
class Given:
    """What a forward is given beside x: see Attention.forward. `positions`: also a cache's Span."""

    positions: Tensor | Span | None = None
    key_padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    samples: Tensor | None = None
    step: int | Tensor | None = None
    cache: Cache | None = None

    def decoding(self, tokens: int) -> bool:
        """Whether `tokens` new ones go to a cache that holds others, or one by one."""
        return self.cache is not None and (self.cache.length > 0 or tokens == 1)

    def seen(self, **new: Tensor) -> list[Tensor]:
        """What the queries can see of each of `new`, by the names of `cache_shapes`: what is given, or with a cache, which
        takes it, that after all tokens before; from here on `key_padding_mask` is of those."""
        if self.cache is None:
            return list(new.values())
        found, self.key_padding_mask = self.cache.put(new, self.key_padding_mask)
        return found


def without_padding(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """x (B, S, D) with padded slots zeroed: they cannot leak through 0 * NaN, neither forward nor into a weight gradient."""
    return x if key_padding_mask is None else x.masked_fill(~key_padding_mask.unsqueeze(-1), 0)


def with_rope_key(nope: Tensor, rope_key: Tensor) -> Tensor:
    """Keys without positions (B, T, K_local, N) and the turned rope key that they share (B, T, R) -> (B, T, K_local, N + R)."""
    return torch.cat([nope, rope_key.unsqueeze(2).expand(*nope.shape[:3], -1)], dim=-1)


def by_head(x: Tensor, width: int) -> Tensor:
    """(B, S, heads * width) -> (B, S, heads, width)."""
    return x.reshape(x.shape[0], x.shape[1], x.shape[2] // width, width)  # (`unflatten` is several times as much Python)
