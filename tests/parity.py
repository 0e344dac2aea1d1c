"""Parity on the axis of a whole test world, and the checks that tests make of it."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from parallel_attn import AxisGroup
from parallel_attn.nn import ShardedModule
from parallel_attn.planning import parity


def world_axis() -> AxisGroup:
    return AxisGroup.of(dist.group.WORLD)


def axis_of(module: nn.Module) -> AxisGroup:
    """The tensor axis of a model, also inside an engine's wrapper."""
    return next(part.tensor_axis for part in module.modules() if isinstance(part, ShardedModule))


def compare(build, forward, inputs: list[Tensor], **settings) -> parity.Parity:
    """`parity.compare` over the whole world."""
    return parity.compare(world_axis(), build, forward, inputs, **settings)


def check(found: parity.Parity, bounds: dict[str, float]) -> None:
    failures = found.failures(bounds)
    assert not failures, f"{failures}; worst parameter: {found.worst_parameter()}"


def assemble(local: dict[str, Tensor], shards: dict, axis: AxisGroup) -> dict[str, Tensor]:
    """Full tensors by name, on every rank; copies must be bitwise equal."""
    full = {}
    for name, tensor, equal in parity.collect(local, shards, axis):
        assert equal, f"{name}: copies differ"
        full[name] = tensor
    return full
