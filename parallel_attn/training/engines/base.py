"""What a data-parallel engine is: it turns local losses into one optimizer step over all replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel_attn.data import Batch
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import Mesh
from parallel_attn.training.optimizer import AdamW, AdamWConfig


@dataclass(frozen=True)
class Job:
    """What an engine has to know of a training job."""

    mesh: Mesh
    optimizer: type[AdamW]
    optimizer_config: AdamWConfig
    precision: str
    micro_batch_size: int
    accumulation: int


class Engine(ABC):
    """Owns the model's gradients and the optimizer. `module` is the model, to be called for evaluation too.

    Built with (module, job, config). `check` refuses what this engine cannot honour, without any process group.
    """

    Config: Any
    module: nn.Module
    optimizer: Any
    """torch's optimizer, or DeepSpeed's around it: what the memory meter looks into."""

    @staticmethod
    def check(config: Any, precision: str, tensor: int) -> None:
        """Raises SettingsError for settings that this engine cannot honour."""

    @abstractmethod
    def forward_backward(self, batches: Sequence[Batch], scale: Tensor, **given: float) -> Tensor:
        """Runs all micro batches of one optimizer step. `scale` = 1 / valid targets of the whole global batch.
        given: passed on to the model's forward (step, label_smoothing, z_loss).

        Returns the sum of this replica's losses in nats, unscaled (float64 scalar).
        """

    @abstractmethod
    def step(self, rate: float, finite: Tensor) -> Tensor:
        """Clips and updates with learning rate `rate`; where the loss (`finite`, a bool scalar) or the gradient norm is
        not finite, parameters and moments stay as they are. Returns the gradient norm before clipping (a scalar, the
        same on every rank)."""

    def parameter_tensors(self) -> list[Tensor]:
        """What holds this rank's part of the parameters that forward uses."""
        return list(self.module.parameters())

    def gradient_buffers(self) -> list[Tensor]:
        """What holds this rank's gradients, where they are not under `.grad`."""
        return []

    def close(self) -> None:
        """Leaves nothing behind that a second engine in this process would stumble over."""


def compute_dtypes(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    """(dtype of the parameters, dtype of the activations or None for the same) of `train.precision`."""
    return {
        "fp32": (torch.float32, None),
        "bf16": (torch.float32, torch.bfloat16),  # the fp32 parameters are the masters
        "fp64": (torch.float64, None),
    }[precision]


def refuse(condition: bool, message: str) -> None:
    if condition:
        raise SettingsError(message)
