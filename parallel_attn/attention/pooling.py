"""Grouped-query attention with other KV heads: fewer by mean pooling (Ainslie 2023, section 2.1), more by repetition.

Pooled, a head j stands for n old ones, W'_j = mean of the W_i. Repeated, each of n new ones is the old one, which changes
nothing: every query head meets the same key and value as before.

AdamW's moments follow from what the gradients are. A shared weight gets the *sum* of the gradients of those that it stands
for, so m' = sum of the m_i. Its square is at most n times the sum of the squares (Cauchy-Schwarz), with equality for equal
gradients: v' = n sum v_i, which never makes the step larger than the mean of theirs. A repeated weight shares its gradient
with its copies: m / n and v / n^2, so that each copy steps as the one did; and repetition followed by pooling is the identity.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from parallel_attn.attention.config import AttentionConfig
from parallel_attn.attention.grouped import GroupedConfig, default_kv_heads
from parallel_attn.errors import SettingsError

MOMENT_POWER = {"master": 0, "exp_avg": 1, "exp_avg_sq": 2}
"""By kind of tensor: how it grows with the gradient."""


def with_kv_heads(config: AttentionConfig, kv_heads: int) -> GroupedConfig:
    """The same settings with other KV heads. Raises SettingsError where one count does not divide the other."""
    if type(config) is not GroupedConfig:
        raise SettingsError(
            f"attention: {type(config).__name__} has no KV heads to pool or to repeat, only a grouped type (mha, gqa, mqa)"
        )
    old, heads = kv_heads_of(config), config.num_heads
    able = [n for n in range(1, heads + 1) if heads % n == 0 and (old % n == 0 or n % old == 0)]
    if kv_heads not in able:
        raise SettingsError(
            f"attention.num_kv_heads={kv_heads} cannot be made of {old} KV heads and {heads} query heads: use one of "
            f"{', '.join(map(str, able))}"
        )
    return replace(config, num_kv_heads=kv_heads)


def kv_heads_of(config: GroupedConfig) -> int:
    return config.num_kv_heads if config.num_kv_heads is not None else default_kv_heads(config.num_heads)


def is_by_kv_head(name: str, config: GroupedConfig) -> bool:
    """Whether a parameter of the layer, by its local name (k.weight, ...), has rows for each KV head."""
    part = name.partition(".")[0]
    return part in ("k", "v") or (part == "k_norm" and config.qk_norm == "full")


def changed(tensor: Tensor, old: int, new: int, kind: str = "master") -> Tensor:
    """A full tensor whose first dim is cut by `old` KV heads -> by `new` ones. kind: master, exp_avg or exp_avg_sq."""
    power = MOMENT_POWER[kind]
    if new == old:
        return tensor
    if new < old:
        size = old // new
        members = tensor.unflatten(0, (new, size, -1))
        return members.mean(1).flatten(0, 1) * float(size) ** power
    size = new // old
    repeated = tensor.unflatten(0, (old, -1)).repeat_interleave(size, 0).flatten(0, 1)
    return repeated / float(size) ** power
