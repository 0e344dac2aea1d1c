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


# ---- dropout -------------------------------------------------------------------------------------------------------


class Dropout:
    """Which attention weights are dropped: a function of (seed, layer, step, sample, head, query, key) alone.

    So the masks are the same at every degree, in every split into micro batches, on every device and in a recomputed
    forward. Counter-based: each weight hashes its own coordinates, nothing carries state.

    rate: share that is dropped. layer: full name. step: the optimizer step, a number or an int64 scalar.
    samples (B,) int64: index of each sample in the run. heads: (start, stop) of this rank's query heads.
    """

    def __init__(
        self, rate: float, seed: int, layer: str, step: int | Tensor, samples: Tensor, heads: tuple[int, int]
    ) -> None:
        self.rate = rate
        samples = samples.to(torch.int64)  # in 32 bits the hash would be another one
        steps = samples.new_zeros(()) + step
        key = _mixed(steps * _GOLDEN + _digest(seed, f"dropout\0{layer}"))
        key = _mixed(key + samples * _GOLDEN).unsqueeze(1)
        self.keys = _mixed(key + torch.arange(*heads, device=samples.device) * _GOLDEN)  # (B, H)
        self.queries: Tensor | None = None
        self.slots: Tensor | None = None

    def part(self, row: int, queries: Tensor, slots: Tensor) -> Dropout:
        """The same masks for one sample of the batch, at the given query slots (S,) and key slots (T,) only."""
        return self._at(self.keys[row : row + 1], queries, slots)

    def block(self, start: int, stop: int, low: int, high: int, queries: int, keys: int) -> Dropout:
        """The same masks for queries start..stop - 1 and keys low..high - 1 out of `queries` x `keys`."""
        device = self.keys.device
        asking = torch.arange(queries, device=device) if self.queries is None else self.queries
        slots = torch.arange(keys, device=device) if self.slots is None else self.slots
        return self._at(self.keys, asking[start:stop], slots[low:high])

    def _at(self, keys: Tensor, queries: Tensor, slots: Tensor) -> Dropout:
        other = object.__new__(Dropout)
        other.rate, other.keys, other.queries, other.slots = self.rate, keys, queries, slots
        return other

    def kept(self) -> Tensor:
        """(B, H, S, T) bool: False where a weight is dropped. What is kept grows by 1 / (1 - rate)."""
        cell = _mixed((self.queries.unsqueeze(1) << 32) + self.slots)  # (S, T)
        bits = self.keys.view(*self.keys.shape, 1, 1) + cell
        # Two rounds of shift and product in place, enough for the top bits, which alone decide: half the passes of _mixed.
        bits.bitwise_xor_(bits >> 30).mul_(_MULTIPLIERS[0])
        bits.bitwise_xor_(bits >> 27).mul_(_MULTIPLIERS[1])
        return bits >= int(self.rate * 2**64) - 2**63


def _digest(seed: int, name: str) -> int:
    """A signed 64-bit number out of (seed, name)."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little", signed=True)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele 2014) on int64, whose product wraps around."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MULTIPLIERS[0]
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MULTIPLIERS[1]
    return x ^ ((x >> 31) & (2**33 - 1))
