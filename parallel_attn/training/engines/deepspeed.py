"""DeepSpeed (ZeRO 0 to 3, Rajbhandari 2020) as the engine, under our own tensor parallelism.

The tensor axis reaches DeepSpeed through its `mpu` argument. It counts a parameter in its gradient norm when the
parameter is flagged, or when it sits on tensor rank 0: so each rank flags what it is the first holder of.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel_attn.data import Batch
from parallel_attn.errors import NonFiniteLoss, SettingsError
from parallel_attn.mesh import Mesh, launcher_ranks
from parallel_attn.nn import sharded_parameters
from parallel_attn.training.engines import zero_state
from parallel_attn.training.engines.base import Engine, Job, refuse
from parallel_attn.training.optimizer import gradient_norm

OWNED = {  # DeepSpeed's key -> what to set instead
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size and train.micro_batch_size",
    "gradient_clipping": "optimizer.grad_clip",
    "optimizer": "the optimizer group",
    "scheduler": "the schedule group",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "torch_autocast": "train.precision",
    "zero_optimization.stage": "engine.zero_stage",
    "tensor_parallel": "parallel.tensor",
    "wandb": "tracking.wandb",
    "tensorboard": "tracking",
    "csv_monitor": "tracking",
    "steps_per_print": "train.log_every",
}


@dataclass
class DeepSpeedEngineConfig:
    zero_stage: int = 1
    ds_config: Any = field(default_factory=dict)

    def check(self) -> None:
        refuse(self.zero_stage not in (0, 1, 2, 3), f"engine.zero_stage={self.zero_stage} is not one of: 0, 1, 2, 3")
        self.own_config()

    def own_config(self) -> dict:
        """The user's DeepSpeed configuration: a mapping, or a JSON file. Raises SettingsError for a key that is ours."""
        given = self.ds_config or {}
        if isinstance(given, str):
            given = _read_json(given)
        refuse(not isinstance(given, dict), f"engine.ds_config={given} is not a mapping of DeepSpeed's keys or a file")
        for key, instead in OWNED.items():
            group, _, leaf = key.rpartition(".")
            inside = given.get(group, {}) if group else given
            refuse(
                isinstance(inside, dict) and leaf in inside, f"engine.ds_config: {key} is not yours to set, use {instead}"
            )
        return given


class DeepSpeedEngine(Engine):
    """Gradients, optimizer state and (stage 3) parameters are sharded over the replicas by DeepSpeed."""

    Config = DeepSpeedEngineConfig

    @staticmethod
    def check(config: DeepSpeedEngineConfig, precision: str, tensor: int) -> None:
        refuse(precision == "fp64", "train.precision=fp64: DeepSpeed has no float64, use engine=torch")
        # Measured: its ZeRO-0 optimizer for bf16 takes an update of its own at initialisation, and its norm counts
        # tensor rank 0 alone.
        refuse(
            precision == "bf16" and config.zero_stage == 0,
            "engine.zero_stage=0 with train.precision=bf16: DeepSpeed's optimizer for it starts Adam one step late and "
            "norms its gradients wrongly under tensor parallelism, use engine.zero_stage=1, 2 or 3",
        )

    def __init__(self, module: nn.Module, job: Job, config: DeepSpeedEngineConfig) -> None:
        deepspeed = import_deepspeed()
        self.job, self.stage, self.replicas = job, config.zero_stage, job.mesh.data
        for _, parameter, shard in sharded_parameters(module):
            parameter.tensor_model_parallel = shard.dim is not None and shard.first_holder
        settings = _merged(
            {
                "train_micro_batch_size_per_gpu": job.micro_batch_size,
                "gradient_accumulation_steps": job.accumulation,
                "gradient_clipping": job.optimizer_config.grad_clip or 0.0,  # left out, DeepSpeed clips at 1.0
                "zero_optimization": {"stage": config.zero_stage, "reduce_bucket_size": bucket_elements(module)},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": job.precision == "bf16"},
                "steps_per_print": 10**9,
            },
            config.own_config(),
        )
        with _local_rank_in_environment():
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=module,
                optimizer=job.optimizer.build(module, job.optimizer_config),
                config=settings,
                mpu=TensorAxisForDeepSpeed(job.mesh),
                dist_init_required=False,
            )
        self.module = self.engine.module

    def forward_backward(self, batches: Sequence[Batch], scale: Tensor, **given: float) -> Tensor:
        total = scale.new_zeros((), dtype=torch.float64)
        # It averages over replicas and over micro batches, the loss is a sum over both.
        scale = scale * self.replicas.degree * len(batches)
        for index, batch in enumerate(batches):
            if index:
                self.engine.step()  # closes the micro batch before; the optimizer moves only after the last one
            loss = self.engine(batch.tokens, batch.targets, **batch.given(), **given)
            self.engine.backward(loss * scale.to(loss.dtype))
            total = total + loss.detach()
        return total

    def step(self, rate: float, finite: Tensor) -> Tensor:
        # ZeRO has no mask on the device: the flag is read before its update.
        if not bool(finite):
            return torch.full((), torch.nan, device=self.job.mesh.device)
        # Stage 0 in fp32 tells no norm: it is ours, from the averaged gradients.
        norm = gradient_norm(self.module, self.job.mesh.tensor) if self.stage == 0 else None
        if norm is not None and not bool(norm.isfinite()):
            return norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        if norm is None:
            norm = torch.as_tensor(self.engine.get_global_grad_norm(), device=self.job.mesh.device)
            if not bool(norm.isfinite()):
                raise NonFiniteLoss("the gradient norm is not finite under a finite loss: DeepSpeed has made this update")
        return norm

    def parameter_tensors(self) -> list[Tensor]:
        # Stage 3 leaves an empty tensor in the parameter and keeps this rank's part beside it.
        return [getattr(parameter, "ds_tensor", parameter) for parameter in self.module.parameters()]

    def gradient_buffers(self) -> list[Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer] if self.stage == 3 else []

    def state_of(self, name: str) -> dict[str, Tensor]:
        return zero_state.get(self.optimizer, self.stage, self.module.get_parameter(name))

    def begin_state(self, updates: int) -> None:
        zero_state.begin(self.optimizer, self.stage, updates)

    def set_state_of(self, name: str, state: Mapping[str, Tensor]) -> None:
        zero_state.put(self.optimizer, self.stage, self.module.get_parameter(name), state, self.replicas)

    def end_state(self) -> None:
        zero_state.end(self.optimizer, self.stage)

    def close(self) -> None:
        import deepspeed

        self.engine.destroy()
        deepspeed.utils.groups.mpu = None  # or the next engine without a tensor axis would ask this one's


def bucket_elements(module: nn.Module) -> int:
    """Elements that are reduced at once. DeepSpeed's default of 5e8 is a buffer of 2 GB in stage 3, however small the model."""
    sizes = [parameter.numel() for parameter in module.parameters()]
    return min(sum(sizes), max(max(sizes), 25_000_000))


class TensorAxisForDeepSpeed:
    """DeepSpeed's `mpu`: only the methods it asks for. One called initialize_sequence_parallel must not exist."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_rank(self) -> int:
        return self._mesh.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.data.degree

    def get_data_parallel_group(self):
        return self._mesh.data.group

    def get_model_parallel_rank(self) -> int:
        return self._mesh.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.tensor.degree

    def get_model_parallel_group(self):
        return self._mesh.tensor.group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def import_deepspeed():
    """DeepSpeed, quiet, and without its C++ build of a shared-memory collective (27 s, and a compiler)."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
    except ImportError as error:
        raise SettingsError(f"engine=deepspeed: DeepSpeed cannot be imported ({error}), use engine=torch") from error
    from deepspeed.ops import __compatible_ops__
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    _import_muon_uncompiled()
    # Its collectives by their old names, once per rank and call site: nothing that a user could act on.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    __compatible_ops__["deepspeed_shm_comm"] = False
    backend = torch.distributed.get_backend()
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    return deepspeed


def _import_muon_uncompiled() -> None:
    """DeepSpeed decorates a function of its Muon optimizer with torch.compile, and imports it to look at any optimizer's
    type. Nobody here uses it, and the compiler behind the decorator takes 1.5 s to load."""
    name = "deepspeed.runtime.zero.muon.original_muon"
    if find_spec(name.rpartition(".")[0]) is None or name in sys.modules:
        return
    compiler = torch.compile
    torch.compile = lambda function=None, **_: function if function is not None else (lambda inner: inner)
    try:
        importlib.import_module(name)
    finally:
        torch.compile = compiler


@contextmanager
def _local_rank_in_environment() -> Iterator[None]:
    """DeepSpeed insists on LOCAL_RANK, which a plain `python train.py` does not have."""
    missing = "LOCAL_RANK" not in os.environ
    if missing:
        os.environ["LOCAL_RANK"] = str(launcher_ranks()[1])
    try:
        yield
    finally:
        if missing:
            del os.environ["LOCAL_RANK"]


def _merged(ours: dict, theirs: dict) -> dict:
    """`theirs` into `ours`, dictionaries key by key."""
    merged = dict(ours)
    for key, value in theirs.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _read_json(path: str) -> Any:
    import json

    try:
        return json.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise SettingsError(f"engine.ds_config={path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"engine.ds_config={path} is not JSON: {error}") from error
