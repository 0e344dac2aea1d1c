"""Which keys a query may see, as booleans."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed_keys(
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
    device: torch.device,
    *,
    first_query: int | None = None,
    first_key: int = 0,
) -> Tensor:
    """(1, S, T) bool, True where a query may see a key. Positions: queries first_query + 0..S-1 (default: the last S of T,
    so that the last query sees the last key), keys first_key + 0..T-1."""
    first_query = keys - queries if first_query is None else first_query
    distance = torch.arange(first_key, first_key + keys, device=device) - torch.arange(
        first_query, first_query + queries, device=device
    ).unsqueeze(1)
    allowed = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        allowed &= distance.abs() < window
    return allowed.unsqueeze(0)
