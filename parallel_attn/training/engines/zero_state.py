"""Masters and moments of DeepSpeed's ZeRO optimizers, one whole parameter at a time.

Stages 1 and 2 keep flat partitions that cut through parameters; stage 3 keeps a padded part of each parameter. DeepSpeed
reads both by parameter (`safe_get_full_*`, a collective over the replicas). Writing needs more care: before the first
step there are no moments to write to, and stage 3's `safe_set_full_*` fails where a parameter does not divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_attn.mesh import AxisGroup
from parallel_attn.training.engines.base import MOMENTS


def _flat_partitions(optimizer: Any, stage: int) -> list[Tensor]:
    return optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups


def get(optimizer: Any, stage: int, parameter: Tensor) -> dict[str, Tensor]:
    """{"master", *MOMENTS} of a parameter, whole. Stage 0 is torch's own optimizer."""
    if stage == 0:
        moments = optimizer.state.get(parameter, {})
        master = parameter.detach()
        return {"master": master, **{kind: moments.get(kind, torch.zeros_like(master)) for kind in MOMENTS}}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    master = safe_get_full_fp32_param(parameter).detach()
    if not all(optimizer.optimizer.state.get(flat) for flat in _flat_partitions(optimizer, stage)):  # before the first step
        return {"master": master, **{kind: torch.zeros_like(master) for kind in MOMENTS}}
    if stage in (1, 2):
        _link_moments(optimizer)
    return {"master": master, **{kind: safe_get_full_optimizer_state(parameter, kind).detach() for kind in MOMENTS}}


def _link_moments(optimizer: Any) -> None:
    """Shows DeepSpeed where the moments of each parameter lie. It looks itself after the update of the *first* parameter
    group, when the others have none yet, and never again."""
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def begin(optimizer: Any, stage: int, updates: int) -> None:
    """Fills the state that the first step would make, as after `updates` steps."""
    state = optimizer.state if stage == 0 else optimizer.optimizer.state
    if stage == 0:
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    else:
        tensors = _flat_partitions(optimizer, stage)
    for tensor in tensors:
        state[tensor] = {
            "step": torch.tensor(float(updates), device=tensor.device),
            **{kind: torch.zeros_like(tensor.detach()) for kind in MOMENTS},
        }
    if stage in (1, 2):
        _link_moments(optimizer)


@torch.no_grad()
def put(optimizer: Any, stage: int, parameter: Tensor, state: Mapping[str, Tensor], replicas: AxisGroup) -> None:
    if stage == 0:
        parameter.copy_(state["master"])
        for kind in MOMENTS:
            optimizer.state[parameter][kind].copy_(state[kind])
        return
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
    from deepspeed.utils.tensor_fragment import safe_set_local_fp32_param, safe_set_local_optimizer_state

    if stage == 3:
        safe_set_local_fp32_param(parameter, _padded_part(state["master"], replicas))
        for kind in MOMENTS:
            safe_set_local_optimizer_state(parameter, _padded_part(state[kind], replicas), kind)
        return
    safe_set_full_fp32_param(parameter, state["master"])
    for kind in MOMENTS:
        safe_set_full_optimizer_state(parameter, state[kind], kind)


def end(optimizer: Any, stage: int) -> None:
    """Refreshes the parameters that forward uses from their masters."""
    if stage == 3:
        for low, master in zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat):
            if low is not None:
                low.data.copy_(master.data)
    elif stage in (1, 2):
        optimizer.update_lp_params()


def _padded_part(value: Tensor, replicas: AxisGroup) -> Tensor:
    """This replica's part of a flat parameter, filled up to the length that all parts have."""
    flat = value.flatten()
    size = -(-flat.numel() // replicas.degree)
    return torch.nn.functional.pad(flat, (0, size * replicas.degree - flat.numel()))[size * replicas.rank :][:size]
