"""RMSNorm (Zhang & Sennrich 2019, eq. 4), computed in float32 or the input's precision if that is higher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_attn.collectives import copy
from parallel_attn.initialization import constant
from parallel_attn.nn.module import Placement, ShardedModule


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class RMSNorm(ShardedModule):
    """y = x / sqrt(mean(x^2) + eps) * gain over the last dim (width D), or * (1 + gain) when `zero_centered`.

    `rank_local=True` says that x differs between tensor ranks (heads of this rank): then the replicated gain sees only a
    part of its gradient on each rank and passes through one `copy`.
    """

    def __init__(
        self,
        placement: Placement,
        width: int,
        *,
        eps: float = 1e-6,
        zero_centered: bool = False,
        rank_local: bool = False,
    ) -> None:
        super().__init__(placement)
        self.width, self.eps, self.zero_centered, self.rank_local = width, eps, zero_centered, rank_local
        self.new_parameter("weight", (width,), constant(0.0 if zero_centered else 1.0))

    def gain(self, dtype: torch.dtype) -> Tensor:
        """The multiplier (D,) in `dtype`."""
        weight = copy(self.weight, self.tensor_axis) if self.rank_local else self.weight
        weight = weight.to(dtype)
        return weight + 1 if self.zero_centered else weight

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D), in the dtype of x."""
        wide = at_least_float32(x)
        return F.rms_norm(wide, (self.width,), self.gain(wide.dtype), self.eps).to(x.dtype)
