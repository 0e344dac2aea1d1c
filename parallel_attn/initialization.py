"""Initial values that do not depend on the degree.

Every parameter is drawn in float32 by a CPU generator seeded by (seed, its full name) over its full shape, then sliced,
then cast. So a rank's shard is the same numbers whatever the degree, the device or the dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Initializer = Callable[[Tensor, torch.Generator], Tensor]
"""Fills a float32 CPU tensor in place and returns it."""


def normal(std: float) -> Initializer:
    return lambda full, generator: full.normal_(0.0, std, generator=generator)


def fan_in_normal(scale: float = 1.0) -> Initializer:
    """Normal with std = scale / sqrt(fan in); a weight is (out, in)."""
    return lambda full, generator: full.normal_(0.0, scale * full.shape[-1] ** -0.5, generator=generator)


def constant(value: float) -> Initializer:
    return lambda full, generator: full.fill_(value)


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator whose stream depends on (seed, name) alone; the same on every machine and rank."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))


def draw_full(full_shape: tuple[int, ...], seed: int, name: str, initializer: Initializer) -> Tensor:
    """The full float32 tensor of the parameter called `name`."""
    return initializer(torch.empty(full_shape, dtype=torch.float32), named_generator(seed, name))


_construction_numbers: dict[tuple[str, Any], int] = {}


def construction_name(kind: str, group: Any) -> str:
    """A name for a layer built without one: a number that counts the layers of its process group.

    Equal on all ranks of the group, also when one of them builds more layers on other groups, or on none.
    """
    number = _construction_numbers.get((kind, group), 0)
    _construction_numbers[kind, group] = number + 1
    return f"{kind}_{number}"
