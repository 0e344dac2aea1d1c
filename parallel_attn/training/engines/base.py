"""What a data-parallel engine is: it turns local losses into one optimizer step over all replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel_attn.data import Batch
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import Mesh
from parallel_attn.nn import sharded_parameters
from parallel_attn.sharding import ParameterShard
from parallel_attn.training.optimizer import AdamW, AdamWConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
ReadState = Callable[[str, ParameterShard], Mapping[str, Tensor]]
"""(full name, record) -> {"master", *MOMENTS}: this tensor rank's shard, on the CPU."""


@dataclass(frozen=True)
class Job:
    """What an engine has to know of a training job."""

    mesh: Mesh
    optimizer: type[AdamW]
    optimizer_config: AdamWConfig
    precision: str
    micro_batch_size: int
    accumulation: int
    deterministic: bool = False


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

    @abstractmethod
    def state_of(self, name: str) -> dict[str, Tensor]:
        """{"master", *MOMENTS} of one parameter by its full name: this tensor rank's shard, whole over the replicas, as
        the optimizer keeps it. A collective over the data axis; to be read before the next step."""

    @abstractmethod
    def set_state_of(self, name: str, state: Mapping[str, Tensor]) -> None:
        """The reverse of `state_of`, after `begin_state`. Every replica passes the whole shard; no collective."""

    @abstractmethod
    def begin_state(self, updates: int) -> None:
        """Makes room for moments, as after `updates` optimizer steps."""

    def end_state(self) -> None:
        """What follows a change of masters: the parameters that forward uses."""

    def load(self, read: ReadState, updates: int) -> None:
        """Puts a saved state in place of the initial one, before the first step."""
        self.begin_state(updates)
        for name, _, shard in list(sharded_parameters(self.module)):
            self.set_state_of(name, read(name, shard))
        self.end_state()

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
