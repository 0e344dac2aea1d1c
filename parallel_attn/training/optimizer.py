"""AdamW (Loshchilov & Hutter 2019) over sharded parameters, gradient norm and clipping from the records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel_attn.collectives import all_reduce
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup
from parallel_attn.nn.module import sharded_parameters


@dataclass
class AdamWConfig:
    lr: float = 4e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: Optional[float] = 1.0

    def check(self) -> None:
        if not 0 < self.lr < math.inf:
            raise SettingsError(f"optimizer.lr={self.lr} must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise SettingsError(f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1)")
        if not 0 < self.eps < math.inf:
            raise SettingsError(f"optimizer.eps={self.eps} must be positive")
        if not 0 <= self.weight_decay < math.inf:
            raise SettingsError(f"optimizer.weight_decay={self.weight_decay} must be 0 or more")
        if self.grad_clip is not None and not 0 < self.grad_clip < math.inf:
            raise SettingsError(f"optimizer.grad_clip={self.grad_clip} must be positive, or null for off")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Decay acts on matrices only; gains and biases are left alone. The records say which is which."""
    decayed, plain = [], []
    for _, parameter, shard in sharded_parameters(model):
        (decayed if shard.decay else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class AdamW:
    """Names the optimizer in a YAML; `build` makes torch's fused one."""

    Config = AdamWConfig

    @staticmethod
    def build(model: nn.Module, config: AdamWConfig) -> torch.optim.Optimizer:
        groups = parameter_groups(model, config.weight_decay)
        return torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=True)


def gradient_norm(model: nn.Module, tensor_axis: AxisGroup, data_axis: AxisGroup = AxisGroup()) -> Tensor:
    """L2 norm over all full gradients, each element counted once: by the first holder of its slice.

    Where FSDP2 has sharded the gradients over the replicas (DTensor), their shards are summed over `data_axis` too.
    A scalar in float32, or float64 for float64 parameters; the same on every rank.
    """
    counted, spread = [], False
    for _, parameter, shard in sharded_parameters(model):
        if parameter.grad is not None:
            spread = spread or isinstance(parameter.grad, DTensor)
            if shard.first_holder:
                counted.append(local_part(parameter.grad))
    reference = next(model.parameters())
    dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=dtype, device=reference.device)
    if counted:
        # In float32 torch's CPU kernel adds one by one: 8e-5 off for 4 million elements, by another amount at each degree.
        wide = torch.float64 if reference.device.type == "cpu" else None
        total = torch.stack([norm.to(dtype) for norm in torch._foreach_norm(counted, dtype=wide)]).square().sum()
    total = all_reduce(total, tensor_axis)
    return (all_reduce(total, data_axis) if spread else total).sqrt()


def clip_gradients(model: nn.Module, norm: Tensor, limit: float | None) -> None:
    """Scales all gradients so that their norm is at most `limit`; None leaves them alone. Does not stall the device."""
    if limit is None:
        return
    grads = [local_part(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, limit / norm.clamp(min=limit))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that FSDP2 may have sharded over the replicas."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
