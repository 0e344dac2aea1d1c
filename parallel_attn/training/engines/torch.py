"""Plain torch as the engine: DistributedDataParallel, or FSDP2 (`fully_shard`), over the data axis; fused AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel_attn.data import Batch
from parallel_attn.models import Block
from parallel_attn.training.engines.base import MOMENTS, Engine, Job, compute_dtypes, refuse
from parallel_attn.training.engines.ordered import average_in_rank_order
from parallel_attn.training.optimizer import clip_gradients, gradient_norm, local_part

SHARDINGS = ("none", "full")


@dataclass
class TorchEngineConfig:
    sharding: str = "none"

    def check(self) -> None:
        refuse(
            self.sharding not in SHARDINGS,
            f"engine.sharding={self.sharding} is not one of: none (DDP), full (FSDP2)",
        )


class TorchEngine(Engine):
    """`sharding=none`: every replica holds its model whole, gradients are averaged by DDP. `sharding=full`: FSDP2 shards
    parameters, gradients and moments of each block over the replicas (ZeRO-3)."""

    Config = TorchEngineConfig

    def __init__(self, module: nn.Module, job: Job, config: TorchEngineConfig) -> None:
        self.module, self.job, self.replicas = module, job, job.mesh.data
        self.synchronize: Any = None
        self.wrapped: nn.Module = module
        if config.sharding == "full":
            self._shard_fully(module)
        elif self.replicas.degree > 1:
            self.wrapped = nn.parallel.DistributedDataParallel(
                module, process_group=self.replicas.group, gradient_as_bucket_view=True
            )
            if job.deterministic and self.replicas.degree > 2:  # a sum of two has one order
                self.wrapped.register_comm_hook(self.replicas, average_in_rank_order)
        self.optimizer = job.optimizer.build(module, job.optimizer_config)

    def _shard_fully(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        _, compute = compute_dtypes(self.job.precision)
        # bf16: gathered and computed in bf16, reduced and kept in fp32. The modules cast their inputs themselves.
        policy = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32 if compute else None, cast_forward_inputs=False
        )
        mesh = self.job.mesh.device_mesh["data"]
        for block in module.modules():
            if isinstance(block, Block):
                fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        self.synchronize = module.set_requires_gradient_sync

    def _accumulating(self, last: bool):
        """Gradients travel once per optimizer step: with its last micro batch."""
        if self.synchronize is not None:
            self.synchronize(last)
            return nullcontext()
        return nullcontext() if last or self.wrapped is self.module else self.wrapped.no_sync()

    def forward_backward(self, batches: Sequence[Batch], scale: Tensor, **given: float) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = scale.new_zeros((), dtype=torch.float64)
        scale = scale * self.replicas.degree  # DDP and FSDP2 average over replicas, the loss is a sum over them
        for index, batch in enumerate(batches):
            with self._accumulating(last=index == len(batches) - 1):
                loss = self.wrapped(batch.tokens, batch.targets, **batch.given(), **given)
                (loss * scale.to(loss.dtype)).backward()
            total = total + loss.detach()
        return total

    def step(self, rate: float, finite: Tensor) -> Tensor:
        norm = gradient_norm(self.module, self.job.mesh.tensor, self.replicas)
        clip_gradients(self.module, norm, self.job.optimizer_config.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # The fused kernel itself leaves parameters and moments alone where this flag is set: no read on the host.
        self.optimizer.found_inf = (~(finite & norm.isfinite())).float()
        self.optimizer.step()
        return norm

    def state_of(self, name: str) -> dict[str, Tensor]:
        parameter = self.module.get_parameter(name)
        moments = self.optimizer.state.get(parameter, {})
        state = {"master": parameter.detach()}
        for kind in MOMENTS:
            state[kind] = moments[kind] if kind in moments else torch.zeros_like(state["master"])
        return {kind: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for kind, tensor in state.items()}

    def begin_state(self, updates: int) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(updates), device=parameter.device),
                    **{kind: torch.zeros_like(parameter.detach()) for kind in MOMENTS},
                }

    @torch.no_grad()
    def set_state_of(self, name: str, state: Mapping[str, Tensor]) -> None:
        parameter = self.module.get_parameter(name)
        moments = self.optimizer.state[parameter]
        for kind, value in state.items():
            target = local_part(parameter.detach() if kind == "master" else moments[kind])
            if isinstance(parameter, DTensor):  # FSDP2 cuts dim 0 like torch.chunk; the last replicas may have none
                parts = value.chunk(self.replicas.degree)
                value = parts[self.replicas.rank] if self.replicas.rank < len(parts) else value[:0]
            target.copy_(value)
