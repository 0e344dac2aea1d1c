"""Rotary position embedding (Su 2021, eq. 15) on the first `fraction` of a head.

Styles: `half` pairs dim i with i + R/2 (Llama, Qwen); `interleaved` pairs 2i with 2i + 1 (the paper, DeepSeek).
Shapes: B batch, S sequence, E head width, R rotary width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from parallel_attn.errors import SettingsError
from parallel_attn.nn.rope_scaling import RopeScaling, as_scaling

STYLES = ("half", "interleaved")


@dataclass(frozen=True)
class Span:
    """Positions of new tokens that are known to lie in 0..bound - 1: `first` + 0..S-1, or `rows` (B, S) where they differ
    between rows. So a table serves them, without asking the device for the largest."""

    first: int
    bound: int
    rows: Tensor | None = None


@dataclass
class RopeConfig:
    theta: float = 10000.0
    fraction: float = 1.0
    style: str = "half"
    scaling: Optional[RopeScaling] = None

    def __post_init__(self) -> None:
        for key in ("theta", "fraction"):
            value = getattr(self, key)
            if type(value) not in (int, float):
                raise SettingsError(f"attention.rope.{key}={value!r} must be a number")
        self.scaling = as_scaling(self.scaling)


class _Tables(dict):
    """(cos, sin) of positions 0, 1, 2, ... by device and precision."""


_SHARED: WeakValueDictionary[tuple, _Tables] = WeakValueDictionary()
"""By rotary settings: all layers that have the same share one, and it goes with the last of them."""


class Rotary:
    """Turns queries and keys. Not a Module and without buffers: a cast of the model cannot reach its tables.

    Tables are computed in float64 and kept in float32, or float64 for float64 inputs.
    fraction=0: no positions at all, a call returns its input. scaling: a RopeScaling, its fields as a dict, or None.
    score_factor: what a type whose scaling asks for it (DeepSeek's) multiplies its softmax scale with; 1.0 otherwise.

    Raises SettingsError for an odd rotary width, an unknown style, theta <= 0, a fraction outside [0, 1], and for
    scaling settings that cannot work.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        fraction: float = 1.0,
        style: str = "half",
        scaling: RopeScaling | dict | None = None,
    ) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise SettingsError(f"attention.rope.fraction={fraction} is not in [0, 1]")
        if not 0 < theta < math.inf:
            raise SettingsError(f"attention.rope.theta={theta} must be positive and finite")
        if style not in STYLES:
            raise SettingsError(f"attention.rope.style={style} is not one of: {', '.join(STYLES)}")
        width = int(head_dim * fraction)
        if fraction > 0 and (width < 2 or width % 2):
            raise SettingsError(
                f"attention.rope.fraction={fraction} of attention.head_dim={head_dim} is a rotary width of {width}: "
                f"it must be even and at least 2, or the fraction 0 for no rotation"
            )
        scaling = as_scaling(scaling)
        if scaling is not None and width == 0:
            raise SettingsError(
                f"attention.rope.scaling.type={scaling.type} has nothing to scale at attention.rope.fraction=0: use null"
            )
        self.width, self.theta, self.style, self.scaling = width, theta, style, scaling
        self.score_factor = 1.0 if scaling is None else scaling.score_factor
        self.frequencies(torch.device("cpu"))  # settings that do not fit each other stop here
        self._kept = _SHARED.setdefault((width, float(theta), style, repr(scaling)), _Tables())

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per token of each pair of dims, (R/2,), float64."""
        exponents = torch.arange(0, self.width, 2, device=device, dtype=torch.float64) / max(self.width, 1)
        unscaled = self.theta**-exponents
        return unscaled if self.scaling is None else self.scaling.frequencies(unscaled, self.theta)

    def angles(self, positions: Tensor) -> Tensor:
        """positions (...) -> angles (..., R/2), float64."""
        return positions.to(torch.float64).unsqueeze(-1) * self.frequencies(positions.device)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin of positions (S,) or (B, S) -> (..., S, 1, R/2), in float32 or float64, times the scaling's factor."""
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        angles = self.angles(positions).unsqueeze(-2)
        factor = 1.0 if self.scaling is None else self.scaling.cos_sin_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def wide(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(..., R/2) -> (..., R): what a dim, and what its partner in the pair, is multiplied with."""
        if self.style == "half":
            return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)

    def kept_tables(self, span: Span, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`wide` tables of a span, out of those that all layers with the same settings share and that grow with what is asked."""
        key = device, dtype == torch.float64
        kept = self._kept.get(key)
        if kept is None or kept[0].shape[0] < span.bound:
            with torch.inference_mode(False), torch.no_grad():
                size = max(span.bound, 2 * kept[0].shape[0] if kept is not None else 0)  # doubling: seldom
                kept = self._kept[key] = self.wide(*self.tables(torch.arange(size, device=device), dtype))
        if span.rows is not None:
            return kept[0][span.rows], kept[1][span.rows]
        return kept[0][span.first : span.first + length], kept[1][span.first : span.first + length]

    def __call__(self, x: Tensor, positions: Tensor | Span | None = None, *, offset: int = 0) -> Tensor:
        """x (B, S, heads, E) -> the same shape and dtype, turned by `positions` (S,) or (B, S), or offset + 0..S-1."""
        if self.width == 0:
            return x
        if positions is None:
            positions = Span(offset, offset + x.shape[1])
        if isinstance(positions, Span) and type(x) is Tensor:
            cos, sin = self.kept_tables(positions, x.shape[1], x.device, x.dtype)
        else:
            if isinstance(positions, Span):  # what a FakeTensor or another subclass makes is not kept for real calls
                first = positions.first
                positions = torch.arange(first, first + x.shape[1], device=x.device) if positions.rows is None else positions.rows
            if positions.shape[-1] != x.shape[1]:  # a single one would be broadcast
                raise ValueError(f"positions of shape {tuple(positions.shape)} for {x.shape[1]} tokens: needs (S,) or (B, S)")
            cos, sin = self.wide(*self.tables(positions, x.dtype))
        whole = self.width == x.shape[-1]
        turned = x if whole else x[..., : self.width]
        if turned.dtype is not cos.dtype:
            turned = turned.to(cos.dtype)
        if self.style == "half":
            first, second = turned.chunk(2, dim=-1)
            partners = torch.cat([second, first], dim=-1)
        else:
            partners = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        out = turned * cos + partners * sin
        if out.dtype is not x.dtype:
            out = out.to(x.dtype)
        return out if whole else torch.cat([out, x[..., self.width :]], dim=-1)
