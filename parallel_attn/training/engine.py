"""Data-parallel engines: what turns local losses into one optimizer step over all replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel_attn.data import Batch
from parallel_attn.mesh import Mesh
from parallel_attn.training.optimizer import AdamW, AdamWConfig, clip_gradients, gradient_norm


@dataclass
class TorchEngineConfig:
    def check(self) -> None:
        """Nothing to refuse."""


class Engine(ABC):
    """Owns the model's gradients and the optimizer.

    `forward_backward` gives the local sum of losses, `step` makes one optimizer step and gives the gradient norm before
    clipping (a scalar, the same on every rank).
    """

    Config: Any = TorchEngineConfig
    module: nn.Module

    @abstractmethod
    def forward_backward(self, batches: Sequence[Batch], scale: Tensor, **loss_settings: float) -> Tensor:
        """Runs all micro batches of one optimizer step. `scale` = 1 / valid targets of the whole global batch.

        Returns the sum of this replica's losses in nats, unscaled.
        """

    @abstractmethod
    def step(self, rate: float, finite: Tensor) -> Tensor:
        """Clips and updates with learning rate `rate`; where the loss (`finite`, a bool scalar) or the gradient norm is
        not finite, parameters and moments stay as they are."""

    @abstractmethod
    def optimizer_tensors(self) -> list[Tensor]:
        """The tensors of the optimizer state that this rank holds."""


class TorchEngine(Engine):
    """Plain torch: DistributedDataParallel over the data axis, fused AdamW."""

    Config = TorchEngineConfig

    def __init__(self, module: nn.Module, mesh: Mesh, config: TorchEngineConfig, optimizer: AdamWConfig) -> None:
        self.module, self.mesh, self.grad_clip = module, mesh, optimizer.grad_clip
        self.optimizer = AdamW.build(module, optimizer)
        self.wrapped: nn.Module = module
        if mesh.data.degree > 1:
            self.wrapped = nn.parallel.DistributedDataParallel(
                module, process_group=mesh.data.group, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def forward_backward(self, batches: Sequence[Batch], scale: Tensor, **loss_settings: float) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = scale.new_zeros(())
        # DDP averages over replicas; the loss is a sum over them.
        scale = scale * self.mesh.data.degree
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with nullcontext() if last or self.wrapped is self.module else self.wrapped.no_sync():
                loss = self.wrapped(batch.tokens, batch.targets, **loss_settings)
                (loss * scale.to(loss.dtype)).backward()
            total = total + loss.detach()
        return total

    def step(self, rate: float, finite: Tensor) -> Tensor:
        norm = gradient_norm(self.module, self.mesh.tensor)
        clip_gradients(self.module, norm, self.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # The fused kernel itself leaves parameters and moments alone where this flag is set: no read on the host.
        self.optimizer.found_inf = (~(finite & norm.isfinite())).float()
        self.optimizer.step()
        return norm

    def optimizer_tensors(self) -> list[Tensor]:
        return [
            value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        ]


def compute_dtypes(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    """(dtype of the parameters, dtype of the activations or None for the same) of `train.precision`."""
    return {
        "fp32": (torch.float32, None),
        "bf16": (torch.float32, torch.bfloat16),  # the fp32 parameters are the masters
        "fp64": (torch.float64, None),
    }[precision]
