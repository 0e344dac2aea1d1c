"""Which tensors of transformers are which of ours, as a list of entries; and the ways between their layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


def unchanged(*tensors: Tensor) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Entry:
    """Some full tensors of ours that are made of some full tensors of theirs, and back.

    to_ours takes their tensors in the order of `theirs` and gives ours in the order of `ours`; to_theirs the reverse.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_ours: Callable[..., Tensors] = unchanged
    to_theirs: Callable[..., Tensors] = unchanged


def same(ours: str, theirs: str) -> Entry:
    """One tensor under two names."""
    return Entry((ours,), (theirs,))


def gain(ours: str, theirs: str, *, shift: float) -> Entry:
    """A norm's gain that is stored as w on one side and as 1 + w on the other: theirs = ours + shift."""
    if shift == 0:
        return same(ours, theirs)
    return Entry((ours,), (theirs,), lambda w: (w - shift,), lambda w: (w + shift,))


def side_by_side(ours: tuple[str, str], theirs: str, widths: tuple[int, int], heads: int) -> Entry:
    """Two of ours, each with its width of rows for each head, that they keep as [first | second] within each head."""

    def to_ours(packed: Tensor) -> Tensors:
        first, second = packed.unflatten(0, (heads, sum(widths))).split(list(widths), dim=1)
        return first.flatten(0, 1), second.flatten(0, 1)

    def to_theirs(first: Tensor, second: Tensor) -> Tensors:
        parts = [part.unflatten(0, (heads, width)) for part, width in zip((first, second), widths, strict=True)]
        return (cat_rows(parts),)

    return Entry(ours, (theirs,), to_ours, to_theirs)


def cat_rows(parts: list[Tensor]) -> Tensor:
    """(heads, width, ...) tensors -> (heads * sum of widths, ...)."""
    return torch.cat(parts, dim=1).flatten(0, 1)


def decoder_entries(layers: int, tied: bool, *, norm_shift: float) -> list[Entry]:
    """What all decoder types share: embedding, head, norms on the residual stream, MLP."""
    entries = [same("embedding.weight", "model.embed_tokens.weight")]
    for i in range(layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        entries += [
            gain(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", shift=norm_shift),
            gain(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", shift=norm_shift),
            *(same(f"{ours}.mlp.{part}.weight", f"{theirs}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")),
        ]
    entries.append(gain("norm.weight", "model.norm.weight", shift=norm_shift))
    if not tied:
        entries.append(same("head.weight", "lm_head.weight"))
    return entries
