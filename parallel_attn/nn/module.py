"""The base of every sharded module: where it stands (Placement) and its parameters with their records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from parallel_attn.initialization import Initializer, construction_name, draw_full
from parallel_attn.mesh import AxisGroup
from parallel_attn.sharding import ParameterShard, Range


@dataclass(frozen=True)
class Placement:
    """Where a module stands: its tensor axis, its full name, the seed, the device and dtype of its parameters."""

    tensor: AxisGroup = AxisGroup()
    name: str = ""
    seed: int = 0
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def standalone(cls, kind: str, *, tensor=None, name=None, seed=0, device=None, dtype=None) -> Placement:
        """For a layer taken alone: without a name it gets a construction number, so that two never start identical."""
        axis = AxisGroup.of(tensor)
        return cls(axis, construction_name(kind, axis.group) if name is None else name, seed, device, dtype)

    def child(self, name: str) -> Placement:
        return replace(self, name=f"{self.name}.{name}" if self.name else name)


class ShardedModule(nn.Module):
    """A module that keeps a ParameterShard for each of its own parameters in `self.shards` (by local name).

    The records stand beside the parameters, not on them: attributes of a Parameter are lost under `fully_shard`.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement
        self.tensor_axis = placement.tensor
        self.shards: dict[str, ParameterShard] = {}

    def extra_repr(self) -> str:
        """Full and local shape of each parameter of its own: what `print(model)` shows of the sharding."""
        parts = []
        for name, shard in self.shards.items():
            held = "" if shard.local_shape() == shard.full_shape else f" -> {shard.local_shape()} here"
            parts.append(f"{name} {shard.full_shape}{held}")
        return ", ".join(parts)

    def new_parameter(
        self,
        name: str,
        full_shape: tuple[int, ...],
        initializer: Initializer,
        *,
        dim: int | None = None,
        ranges: tuple[Range, ...] = (),
        decay: bool = False,
    ) -> None:
        """Registers this rank's shard of a parameter and its record. `dim=None`: every rank holds it whole."""
        axis = self.tensor_axis
        shard = ParameterShard(tuple(full_shape), dim, tuple(ranges), axis.rank, axis.degree, decay)
        place = self.placement
        dtype = place.dtype or torch.get_default_dtype()
        device = torch.device(place.device) if place.device is not None else torch.get_default_device()
        if device.type == "meta":
            local = torch.empty(shard.local_shape(), dtype=dtype, device=device)
        else:
            full_name = f"{place.name}.{name}" if place.name else name
            with torch.device("cpu"):
                full = draw_full(shard.full_shape, place.seed, full_name, initializer)
            local = full[shard.index()].to(device=device, dtype=dtype, copy=True).contiguous()
        self.shards[name] = shard
        self.register_parameter(name, nn.Parameter(local))


def parameter_shards(module: nn.Module) -> dict[str, ParameterShard]:
    """The records of all parameters below `module`, by full name as in `named_parameters()` (tied ones once).

    A parameter of a module that is not ours has no record: it is taken as replicated over the tensor axis of the
    sharded modules beside it, which is what it is when its input is replicated.
    """
    found: dict[str, ParameterShard] = {}
    axis = next((m.tensor_axis for m in module.modules() if isinstance(m, ShardedModule)), AxisGroup())
    for name, parameter in module.named_parameters():
        owner_name, _, local_name = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        shard = owner.shards.get(local_name) if isinstance(owner, ShardedModule) else None
        if shard is None:
            shard = ParameterShard.replicated(parameter.shape, axis.rank, axis.degree, decay=parameter.dim() > 1)
        found[name] = shard
    return found


def sharded_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor, ParameterShard]]:
    """(full name, parameter, record) of all parameters below `module`."""
    shards = parameter_shards(module)
    for name, parameter in module.named_parameters():
        yield name, parameter, shards[name]
