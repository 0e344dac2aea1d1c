import os

import pytest
import torch
import torch.distributed as dist

from parallel_attn import AxisGroup, GroupedQueryAttention, SettingsError
from parallel_attn import mesh as meshes
from tests.world import run


def test_layouts():
    assert meshes.layout(4, 2, None) == (2, 2)
    assert meshes.layout(6, 3, 2) == (2, 3)
    with pytest.raises(SettingsError, match=r"parallel\.tensor=3 does not divide the 4 started processes: use one of 1, 2, 4"):
        meshes.layout(4, 3, None)
    with pytest.raises(SettingsError, match=r"parallel\.data=3 x parallel\.tensor=2 .* use parallel\.data=2"):
        meshes.layout(4, 2, 3)
    with pytest.raises(SettingsError, match=r"parallel\.tensor=0"):
        meshes.layout(4, 0, None)


def test_slurm_variables_are_no_launch(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert meshes.launcher_ranks() == (0, 0, 1)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert meshes.launcher_ranks() == (9, 1, 16)


@pytest.mark.parametrize(
    "gpus, local_world, local_rank, wanted, chosen",
    [
        (0, 2, 1, "auto", "cpu"),
        (2, 2, 1, "auto", "cuda:1"),  # by LOCAL_RANK, not by RANK
        (1, 2, 0, "auto", "cpu"),  # both processes of the machine decide alike
        (1, 2, 1, "auto", "cpu"),
        (8, 8, 3, "cpu", "cpu"),
        (8, 8, 3, "cuda", "cuda:3"),
    ],
)
def test_device_follows_the_local_rank(monkeypatch, gpus, local_world, local_rank, wanted, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world))
    assert meshes.choose_device(wanted, local_rank) == torch.device(chosen)


def test_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="device=cuda: local rank 0 has no GPU"):
        meshes.choose_device("cuda", 0)
    with pytest.raises(SettingsError, match="device=tpu is not one of: auto, cpu, cuda"):
        meshes.choose_device("tpu", 0)


def mesh_case():
    mesh = meshes.start(torch.device("cpu"), tensor=2)
    again = meshes.start(torch.device("cpu"), tensor=1)  # keeps the process group
    assert (mesh.data.degree, mesh.tensor.degree, again.data.degree) == (2, 2, 4)
    ranks = dist.get_process_group_ranks(mesh.tensor.group), dist.get_process_group_ranks(mesh.data.group)
    return mesh.data.rank, mesh.tensor.rank, *ranks


def test_tensor_is_the_innermost_axis():
    assert run(4, mesh_case) == [
        (0, 0, [0, 1], [0, 2]),
        (0, 1, [0, 1], [1, 3]),
        (1, 0, [2, 3], [0, 2]),
        (1, 1, [2, 3], [1, 3]),
    ]


def subgroup_case():
    axis = AxisGroup.of(dist.group.WORLD)
    members = (0, 1) if axis.rank < 2 else (2, 3)
    sub = axis.subgroup(members)
    total = torch.tensor([float(axis.rank)])
    dist.all_reduce(total, group=sub.group)
    assert axis.subgroup(members) is sub, "made twice"
    assert axis.subgroup((axis.rank,)).degree == 1
    assert axis.subgroup((0, 1, 2, 3)) is axis
    # only some ranks ask for one: nobody else has to take part
    if axis.rank in (0, 3):
        pair = axis.subgroup((0, 3))
        dist.all_reduce(torch.ones(1), group=pair.group)
    return sub.rank, total.item()


def test_subgroups_are_made_by_their_members_alone_and_once():
    assert run(4, subgroup_case) == [(0, 1.0), (1, 1.0), (0, 5.0), (1, 5.0)]


def foreign_group_case():
    """A layer on a process group that a stranger made, over some of the world's ranks."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        layer = GroupedQueryAttention(16, num_heads=4, num_kv_heads=1, tensor_parallel=group, name="a")
        assert (layer.tensor_axis.rank, layer.tensor_axis.degree) == (dist.get_rank() // 2, 2)
        return layer(torch.ones(1, 3, 16)).detach()
    with pytest.raises(SettingsError, match="not a member"):
        GroupedQueryAttention(16, num_heads=4, tensor_parallel=group)


def test_a_layer_on_a_strangers_process_group():
    _, first, _, second = run(4, foreign_group_case)
    alone = GroupedQueryAttention(16, num_heads=4, num_kv_heads=1, name="a")(torch.ones(1, 3, 16)).detach()
    torch.testing.assert_close(first, alone)
    assert torch.equal(first, second)


def mesh_dim_case():
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(SettingsError, match="pass mesh"):
        AxisGroup.of(mesh)
    with pytest.raises(SettingsError, match="not a DeviceMesh"):
        AxisGroup.of("tp")
    return AxisGroup.of(mesh["tp"]).rank


def test_any_mesh_dim_will_do():
    assert run(4, mesh_dim_case) == [0, 1, 0, 1]


def test_without_torch_distributed_a_layer_is_one_rank():
    assert not dist.is_initialized()
    assert AxisGroup.of(None).degree == 1
    assert "RANK" not in os.environ


def test_a_restart_has_keys_of_its_own_in_the_launchers_store(monkeypatch):
    """The store outlives a restart, and with it the addresses of ranks that are gone: gloo would try to reach them."""
    store = dist.HashStore()
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RESTART_COUNT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))

    def publish(backend, *, store, rank, world_size, timeout):
        store.set("address", "new")
        raise InterruptedError

    monkeypatch.setattr(meshes, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(meshes.dist, "init_process_group", publish)
    store.set("address", "old")
    with pytest.raises(InterruptedError):
        meshes.start(torch.device("cpu"))
    assert store.get("address") == b"old"
