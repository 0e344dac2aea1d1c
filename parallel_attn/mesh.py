"""The device mesh (data, tensor), process groups, the device and its back end, start-up and shutdown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from parallel_attn.errors import PeerLost, SettingsError


@dataclass(frozen=True, eq=False)
class AxisGroup:
    """One axis of the mesh as this rank sees it: its process group, its place in it, how many ranks it has.

    `group` is None for a world of one without `torch.distributed`; collectives over one rank are no-ops, so nothing
    that uses an AxisGroup has to ask. A larger axis without a group exists on paper only: layers can be built on it (on
    the meta device, say) to check and count, not run.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    degree: int = 1

    @classmethod
    def of(cls, where: AxisGroup | DeviceMesh | dist.ProcessGroup | None, *, axis: str = "tensor") -> AxisGroup:
        """The axis of a DeviceMesh (one dim, or the dim called `axis`), of a process group, or of nothing: one rank.

        Raises SettingsError for a mesh of several dims none of which is called `axis`.
        """
        if where is None:
            return cls()
        if isinstance(where, AxisGroup):
            return where
        if isinstance(where, DeviceMesh):
            if where.ndim > 1:
                names = where.mesh_dim_names or ()
                if axis not in names:
                    raise SettingsError(f"the device mesh has dims {names or where.ndim}: pass mesh[NAME] of one dim")
                where = where[axis]
            where = where.get_group()
        outsider = where is dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to ranks outside
        if not outsider and not isinstance(where, dist.ProcessGroup):
            raise SettingsError(f"tensor_parallel={where!r} is not a DeviceMesh, a process group or None")
        if outsider or dist.get_rank(where) < 0:
            raise SettingsError(f"rank {dist.get_rank()} is not a member of the process group it builds a layer on")
        return cls(where, dist.get_rank(where), dist.get_world_size(where))

    def __deepcopy__(self, memo) -> AxisGroup:
        return self  # a copy of a layer (an EMA, say) stands on the same ranks

    def __reduce__(self):
        if self.degree == 1:
            return AxisGroup, ()
        raise TypeError("a layer on several ranks cannot be pickled with its process group: save its state_dict()")

    def subgroup(self, ranks: tuple[int, ...]) -> AxisGroup:
        """The axis made of `ranks` (places on this axis), which must hold this rank.

        Made once per (group, ranks) and only by its members: nobody else has to take part. All members must ask in
        the same order, which they do, since they build the same model.
        """
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not in {ranks}")
        if len(ranks) == 1:
            return AxisGroup()
        if len(ranks) == self.degree:
            return self
        if self.group is None:  # an axis on paper, as a planner builds it
            return AxisGroup(None, ranks.index(self.rank), len(ranks))
        for parent, members, made in _subgroups:
            if parent is self.group and members == ranks:
                return made
        members = [dist.get_global_rank(self.group, rank) for rank in ranks]
        group = dist.new_group(members, backend=dist.get_backend(self.group), use_local_synchronization=True)
        made = AxisGroup(group, ranks.index(self.rank), len(ranks))
        _subgroups.append((self.group, ranks, made))
        return made


_meshes: dict[tuple, Mesh] = {}
_subgroups: list[tuple[dist.ProcessGroup, tuple[int, ...], AxisGroup]] = []


@dataclass(frozen=True)
class Mesh:
    """The mesh of a training job: `world = data x tensor`, tensor innermost."""

    device_mesh: DeviceMesh
    device: torch.device
    data: AxisGroup
    tensor: AxisGroup
    world: AxisGroup

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0


def launcher_ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun set them; a world of one without torchrun, whatever SLURM says.

    Where somebody has started torch.distributed in another way, its ranks count (on one machine).
    """
    if launched():
        try:
            return tuple(int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        except ValueError:
            given = ", ".join(f"{name}={os.environ.get(name)}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
            raise SettingsError(f"{given} in the environment are not numbers: start with torchrun, or unset them") from None
    if dist.is_initialized():
        return dist.get_rank(), dist.get_rank(), dist.get_world_size()
    return 0, 0, 1


def launched() -> bool:
    """Whether a launcher has set this process's place in a world."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """`auto` is the CUDA device of this local rank where there is one, else the CPU.

    Raises SettingsError for an unknown name and for cuda without a device for this local rank.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device={wanted} is not one of: auto, cpu, cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if wanted == "cuda" and local_rank >= count:
        raise SettingsError(
            f"device=cuda: local rank {local_rank} has no GPU of its own ({count} visible): "
            f"start at most {count} processes on this machine, or use device=cpu"
        )
    # All ranks of a machine decide alike: a machine with too few GPUs for its processes runs them all on the CPU.
    if wanted == "cuda" or (wanted == "auto" and count >= max(local_world, local_rank + 1)):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def layout(world_size: int, tensor: int, data: int | None) -> tuple[int, int]:
    """(data, tensor) degrees of a world. Raises SettingsError when they do not multiply to its size."""
    if tensor < 1 or world_size % tensor:
        fits = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
        raise SettingsError(
            f"parallel.tensor={tensor} does not divide the {world_size} started process{'es' * (world_size > 1)}: "
            f"use one of {fits}"
        )
    derived = world_size // tensor
    if data is not None and data != derived:
        raise SettingsError(
            f"parallel.data={data} x parallel.tensor={tensor} is not the {world_size} started processes: "
            f"use parallel.data={derived} or null"
        )
    return derived, tensor


def start(device: torch.device, *, tensor: int = 1, data: int | None = None, timeout_seconds: float = 1800) -> Mesh:
    """Starts torch.distributed once per process (nccl on CUDA, gloo on CPU) and builds the mesh.

    A process group that is already there is kept: a second job in the same process uses it again.
    """
    rank, _, world_size = launcher_ranks()
    data, tensor = layout(world_size, tensor, data)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        # nccl binds to its device at once (eager start, a clear error here rather than in the first collective)
        options = {"device_id": device} if device.type == "cuda" else {}
        timeout = timedelta(seconds=timeout_seconds)
        if not launched():  # no launcher: a world of one, without any port
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        elif restarts := _restarts():
            # The launcher's store lives on: a rank could find the address of a peer of the attempt before.
            store = next(rendezvous("env://", timeout=timeout))[0]
            options |= {"store": dist.PrefixStore(f"restart{restarts}", store), "rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=timeout, **options)
    key = dist.group.WORLD, data, tensor
    if key not in _meshes:  # the jobs of a sweep share their groups: each group costs threads and sockets
        made = init_device_mesh(device.type, (data, tensor), mesh_dim_names=("data", "tensor"))
        world = AxisGroup(dist.group.WORLD, rank, world_size)
        _meshes[key] = Mesh(made, device, AxisGroup.of(made, axis="data"), AxisGroup.of(made), world)
    return _meshes[key]


def _restarts() -> int:
    """How often torchrun has started all ranks of this world anew, on one machine; on several, its agents count apart."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if one_machine else 0


def lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because a peer is gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError)):
        return True
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


@contextmanager
def peers_expected() -> Iterator[None]:
    """Turns the back ends' several ways to say that a peer is gone into PeerLost."""
    try:
        yield
    except RuntimeError as error:
        if not lost_contact(error):
            raise
        raise PeerLost("another rank left or died before this one: its own error is the cause") from error


def shutdown() -> None:
    """Leaves torch.distributed; a barrier first, so that nobody tears down a connection that a peer still reads."""
    _subgroups.clear()
    _meshes.clear()
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            dist.barrier()
        dist.destroy_process_group()
