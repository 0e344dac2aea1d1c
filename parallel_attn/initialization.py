"""Initial values that do not depend on the degree.

Every parameter is drawn in float32 by a CPU generator seeded by (seed, its full name) over its full shape, then sliced,
then cast. So a rank's shard is the same numbers whatever the degree, the device or the dtype.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

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


_construction_numbers = itertools.count()


def construction_name(kind: str) -> str:
    """A name for a layer built without one: a process-wide number, equal on all ranks that build alike."""
    return f"{kind}_{next(_construction_numbers)}"
