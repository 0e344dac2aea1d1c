"""What generation keeps of the tokens before, so that each token is worked on once.

One `Cache` serves all types: a type declares by name what it keeps of a token (`Attention.cache_shapes`), the cache
keeps it for all tokens, or for the last `window` of them, and knows which slots are real and where positions stand.

Shapes: B batch, S new tokens, T tokens that can be seen, K heads of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from parallel_attn.errors import SettingsError
from parallel_attn.nn.rotary import Span


class Cache:
    """Of one layer, for `batch` rows of up to `slots` tokens.

    shapes: what is kept of a token, by name: (heads, width), or (width,) where heads share it. window: only so many last
    tokens are kept, in a ring.
    tensors: by name (B, heads, capacity, width) or (B, capacity, width); what was not written yet is never read.
    length: tokens that were put in, padded ones included.

    Raises SettingsError for a batch or slots that cannot be.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        batch: int,
        slots: int,
        *,
        window: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for key, value in (("batch", batch), ("slots", slots)):
            if type(value) is not int or value < 1:
                raise SettingsError(f"cache: {key}={value!r} must be a whole number, at least 1")
        self.shapes, self.batch, self.slots, self.window = dict(shapes), batch, slots, window
        self.capacity = slots if window is None else min(slots, window)
        with torch.inference_mode(False):  # made here, written in any mode
            self.tensors = {
                name: torch.empty((batch, *shape[:-1], self.capacity, shape[-1]), device=device, dtype=dtype)
                for name, shape in self.shapes.items()
            }
        self.owner: object = None  # the layer that it was last found to fit
        self.reset()

    def reset(self) -> None:
        """Forgets all tokens."""
        self.length = 0
        self.real: Tensor | None = None  # (B, capacity) bool; None: every slot that was written is real
        self.seen: Tensor | None = None  # (B, 1): real tokens of each row; None: length

    def bytes(self) -> int:
        """Of the live tensors, all slots."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    def bytes_per_token(self) -> float:
        """Of the live tensors, for one row and one token that is kept."""
        return self.bytes() / (self.batch * self.capacity)

    def check_layer(self, shapes: Mapping[str, tuple[int, ...]], window: int | None) -> None:
        """Raises ValueError for a layer that keeps other `shapes`, or another window."""
        if self.shapes != shapes or self.window != window:
            mine = f"{self.shapes}" + (f" in a window of {self.window}" if self.window else "")
            wanted = f"{dict(shapes)}" + (f" in a window of {window}" if window else "")
            raise ValueError(f"cache of another layer: it keeps {mine}, this one needs {wanted}")

    def check_room(self, batch: int, tokens: int) -> None:
        """Raises ValueError where `tokens` more of each of `batch` rows cannot be put in."""
        if self.batch != batch:
            raise ValueError(f"cache for {self.batch} rows, given {batch}: make another one, or reset and use as many")
        if self.length + tokens > self.slots:
            raise ValueError(f"cache of {self.slots} slots is full: {self.length} tokens in it, {tokens} more given")

    def span(self, tokens: int, key_padding_mask: Tensor | None) -> Span:
        """Positions of `tokens` new ones: each row counts its real tokens."""
        if key_padding_mask is None and self.seen is None:
            return Span(self.length, self.slots)
        before = self.length if self.seen is None else self.seen
        if key_padding_mask is None:
            rows = before + torch.arange(tokens, device=self.seen.device)
        else:
            rows = (before + key_padding_mask.cumsum(1) - 1).clamp_(min=0)
        return Span(self.length, self.slots, rows)

    def put(self, new: Mapping[str, Tensor], key_padding_mask: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """new: by name (B, S, heads, width) or (B, S, width); key_padding_mask (B, S) bool, True where a token is real.

        Returns what the new tokens can see, in the order of `new`: (B, T, heads, width) or (B, T, width), the new ones last
        (a single new one: anywhere); and which of them are real (B, T), None for all. Raises ValueError under autograd.
        """
        if torch.is_grad_enabled() and any(part.requires_grad for part in new.values()):
            raise ValueError("a cache keeps no graph: generate under torch.no_grad() or torch.inference_mode()")
        tokens = next(iter(new.values())).shape[1]
        if self.seen is not None or key_padding_mask is not None:
            self._count(tokens, key_padding_mask)
        start, self.length = self.length, self.length + tokens
        if self.length <= self.capacity:
            first, visible = start, self.length
        elif tokens == 1:  # one slot of the ring: with all of it in sight its order does not matter
            first, visible = start % self.capacity, self.capacity
        else:
            return self._past_the_ring(new, key_padding_mask, start)
        found = []
        for name, part in new.items():
            kept = self.tensors[name]
            if kept.dim() == 4:
                kept.narrow(2, first, tokens).copy_(part.transpose(1, 2))
                found.append(kept.narrow(2, 0, visible).transpose(1, 2))
            else:
                kept.narrow(1, first, tokens).copy_(part)
                found.append(kept.narrow(1, 0, visible))
        if self.real is None:
            return found, None
        self.real[:, first : first + tokens] = True if key_padding_mask is None else key_padding_mask
        return found, self.real[:, :visible]

    def _count(self, tokens: int, key_padding_mask: Tensor | None) -> None:
        if key_padding_mask is None:
            self.seen = self.seen + tokens
            return
        if self.seen is None:
            device = key_padding_mask.device
            self.seen = torch.full((self.batch, 1), self.length, device=device)
            with torch.inference_mode(False):
                self.real = torch.ones(self.batch, self.capacity, dtype=torch.bool, device=device)
        self.seen = self.seen + key_padding_mask.sum(1, keepdim=True)

    def _past_the_ring(self, new: Mapping[str, Tensor], key_padding_mask: Tensor | None, start: int):
        """Several tokens that push others out: all that any of them sees, in order, then the last `window` are kept."""
        kept_before = min(start, self.capacity)
        before = torch.arange(start - kept_before, start) % self.capacity
        last = torch.arange(max(0, self.length - self.capacity), self.length)
        found = []
        for name, part in new.items():
            kept = self.tensors[name]
            along = kept.dim() - 2
            whole = torch.cat([kept.index_select(along, before.to(kept.device)).transpose(1, along), part], 1)
            found.append(whole)
            tail = whole[:, -last.numel() :].transpose(1, along)
            kept.index_copy_(along, (last % self.capacity).to(kept.device), tail)
        if self.real is None:
            return found, None
        fresh = torch.ones_like(self.real[:, :1]).expand(-1, self.length - start) if key_padding_mask is None else key_padding_mask
        real = torch.cat([self.real[:, before.to(self.real.device)], fresh], 1)
        self.real[:, (last % self.capacity).to(self.real.device)] = real[:, -last.numel() :]
        return found, real

    def contents(self) -> tuple[list[Tensor], Tensor | None]:
        """What is in it, shaped as `put` returns it."""
        visible = min(self.length, self.capacity)
        parts = [kept.narrow(kept.dim() - 2, 0, visible).transpose(1, kept.dim() - 2) for kept in self.tensors.values()]
        return parts, None if self.real is None else self.real[:, :visible]


def elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Elements that `shapes` are, together."""
    return sum(math.prod(shape) for shape in shapes.values())
