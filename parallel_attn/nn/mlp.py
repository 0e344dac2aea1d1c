"""SwiGLU MLP (Shazeer 2020, eq. 6), column- then row-parallel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_attn.initialization import fan_in_normal
from parallel_attn.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallel_attn.nn.module import Placement, ShardedModule
from parallel_attn.sharding import split_evenly


class SwiGLU(ShardedModule):
    """down(silu(gate(x)) * up(x)): D -> F -> D; the width F is split over the tensor axis, unevenly where it must.

    Raises SettingsError when F is less than the degree. `output_scale` multiplies the initial std of `down`.
    """

    def __init__(self, placement: Placement, hidden_size: int, mlp_size: int, *, output_scale: float = 1.0) -> None:
        super().__init__(placement)
        ranges = split_evenly(mlp_size, self.tensor_axis.degree, what="model.mlp.hidden_size")
        self.gate = ColumnParallelLinear(placement.child("gate"), hidden_size, mlp_size, ranges)
        self.up = ColumnParallelLinear(placement.child("up"), hidden_size, mlp_size, ranges)
        self.down = RowParallelLinear(
            placement.child("down"), mlp_size, hidden_size, ranges, initializer=fan_in_normal(output_scale)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, D), replicated -> (B, S, D), replicated."""
        gate, up = column_parallel(x, [self.gate, self.up])
        if torch.is_grad_enabled():
            return self.down(F.silu(gate) * up)
        return self.down(F.silu(gate, inplace=True).mul_(up))  # nobody needs the parts again
