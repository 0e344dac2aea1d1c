"""Attention with its scores written out, for what no fused kernel takes: soft cap and dropout.

In blocks of queries, each recomputed in backward, so that memory grows with block x T, never with S x T. It costs about
the forward once more, and the scores go through memory: `python -m benchmarks.attention` measures it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel_attn.attention.masks import allowed_keys
from parallel_attn.initialization import Dropout

QUERY_BLOCK = 128


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    sinks: Tensor | None,
    soft_cap: float | None,
    dropout: Dropout | None,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """Shapes and settings as in `kernels.attend`."""
    queries, keys = q.shape[1], k.shape[1]
    outs = []
    for start in range(0, queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, queries)
        first, last = start + keys - queries, stop + keys - queries  # positions of this block's queries
        low = 0 if window is None else max(0, first - window + 1)
        high = last if causal else keys if window is None else min(keys, last + window - 1)
        allowed = allowed_keys(stop - start, high - low, causal, window, q.device, first_query=first, first_key=low)
        if key_padding_mask is not None:
            allowed = allowed & key_padding_mask[:, low:high].unsqueeze(1)
        block = (
            q[:, start:stop],
            k[:, low:high],
            v[:, low:high],
            allowed,
            sinks,
            scale,
            soft_cap,
            dropout and dropout.block(start, stop, low, high, queries, keys),
        )
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            outs.append(checkpoint(_block, *block, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(_block(*block))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _block(q, k, v, allowed, sinks, scale, soft_cap, dropout: Dropout | None) -> Tensor:
    """q (B, s, H, E), k (B, t, K, E), v (B, t, K, Ev), allowed (B or 1, s, t) -> (B, s, H, Ev)."""
    grouped = q.unflatten(2, (k.shape[2], -1))  # (B, s, K, g, E)
    scores = torch.einsum("bskge,btke->bkgst", grouped * scale, k).flatten(1, 2)  # (B, H, s, t)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if soft_cap is not None:
        wide = soft_cap * torch.tanh(wide / soft_cap)
    allowed = allowed.unsqueeze(1)
    wide = wide.masked_fill(~allowed, -torch.inf)
    # The running maximum may be -inf in a row without keys: 0 there, so that nothing becomes NaN.
    top = wide.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(wide.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (wide - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sink - top).exp()
    weights = weights / total.masked_fill(total == 0, 1)
    if dropout is not None:
        weights = weights * dropout.multiplier(weights.dtype)
    weights = weights.to(v.dtype).unflatten(1, (k.shape[2], -1))
    return torch.einsum("bkgst,btke->bskge", weights, v).flatten(2, 3)
