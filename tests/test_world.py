"""The test world itself: a harness that hides a failure, or hangs on one, would make every other test worthless."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests import world
from tests.world import CaseFailed, run

ROOT = Path(__file__).resolve().parent.parent


def identity(scale):
    total = torch.full((2,), float(dist.get_rank() + 1)) * scale
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), os.getpid(), total


def raise_on(rank):
    if dist.get_rank() == rank:
        secret = 41
        raise KeyError(f"only rank {rank} has {secret + 1}")
    dist.barrier()


def die_on(rank, how):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == rank:
        how_to_die(how)
    dist.all_reduce(torch.ones(1))


def how_to_die(how):
    if how == "exit":
        os._exit(0)
    if how == "exit, a fork lives on" and os.fork():
        os._exit(0)
    if how == "exit, a fork lives on":
        a_place_to_hang()  # holds the rank's pipe and sockets open: nothing but the process's end can be seen
    if how == "sys.exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def echo_then_cause():
    """Rank 0 raises the error of a lost peer at once, rank 1 the real cause a little later."""
    if dist.get_rank() == 0:
        raise RuntimeError("[pair.cc:123] Connection closed by peer")
    time.sleep(1.5)
    raise ValueError("the cause")


def a_place_to_hang():
    time.sleep(1000)


def hang_on(rank):
    if dist.get_rank() == rank:
        a_place_to_hang()
    return "done"


def leave(what):
    if what == "dtype":
        torch.set_default_dtype(torch.float64)
    if what == "gradients":
        torch.set_grad_enabled(False)
    if what == "group":
        dist.destroy_process_group()


def change_surroundings():
    os.environ["LEFT_BY_A_CASE"] = "1"
    os.chdir("/")
    torch.manual_seed(dist.get_rank() + 5)
    torch.rand(1)


def surroundings():
    return os.environ.get("LEFT_BY_A_CASE"), os.getcwd(), torch.rand(1).item(), random.random()


def start_a_sleeper():
    return subprocess.Popen(["sleep", "1000"]).pid


def start_a_sleeper_then_raise(folder):
    Path(folder, f"pid{dist.get_rank()}").write_text(str(start_a_sleeper()))
    dist.barrier()
    raise ValueError("sleepers started")


def make_groups(count):
    for _ in range(count):
        dist.new_group()
    return os.getpid()


def unpicklable():
    return lambda: None


def pids(size):
    return [pid for _, _, pid, _ in run(size, identity, 1.0)]


def wait_until_gone(processes, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(is_running(pid) for pid in processes):
        time.sleep(0.05)
    return [pid for pid in processes if is_running(pid)]


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_results_per_rank(size):
    results = run(size, identity, 2.0)
    assert [(rank, world_size) for rank, world_size, _, _ in results] == [(rank, size) for rank in range(size)]
    assert len({pid for _, _, pid, _ in results} | {os.getpid()}) == size + 1
    for _, _, _, total in results:
        assert total.tolist() == [size * (size + 1.0)] * 2


def test_reused():
    assert pids(2) == pids(2)
    assert not set(pids(2)) & set(pids(3))


def test_replaced_when_it_holds_many_groups(monkeypatch):
    monkeypatch.setattr(world, "GROUPS_KEPT", 4)
    world.stop_all()
    first = run(2, make_groups, 3)
    assert run(2, make_groups, 1) == first
    assert not set(pids(2)) & set(first)


def test_raise_on_one_rank_while_others_wait():
    before, start = pids(3), time.monotonic()
    with pytest.raises(CaseFailed) as caught:
        run(3, raise_on, 1)
    assert time.monotonic() - start < 10
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    text = str(caught.value)
    assert "rank 1 of 3: KeyError" in text and "only rank 1 has 42" in text
    assert "in raise_on" in text and "secret = 41" in text  # the child's traceback and the values there
    assert not wait_until_gone(before)
    assert not set(pids(3)) & set(before)


@pytest.mark.parametrize(
    "how, kind, said",
    [
        pytest.param("exit", "died", "exited with code 0", id="os._exit"),
        pytest.param("exit, a fork lives on", "died", "exited with code 0", id="fork"),
        pytest.param("kill", "died", "SIGKILL", id="sigkill"),
        pytest.param("sys.exit", "SystemExit", "3", id="sys.exit"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_death_of_one_rank(how, kind, said, rank):
    with pytest.raises(CaseFailed) as caught:
        run(3, die_on, rank, how)
    assert (caught.value.rank, caught.value.kind) == (rank, kind)
    assert said in caught.value.message
    assert [rank for rank, *_ in run(3, identity, 1.0)] == [0, 1, 2]


def test_echo_of_a_lost_peer_is_not_the_cause():
    with pytest.raises(CaseFailed) as caught:
        run(2, echo_then_cause)
    assert (caught.value.rank, caught.value.message) == (1, "the cause")
    assert "later, rank 0" not in str(caught.value).splitlines()[0]


def test_hang_shows_stacks():
    start = time.monotonic()
    with pytest.raises(CaseFailed) as caught:
        run(2, hang_on, 1, timeout=1.0)
    assert time.monotonic() - start < 10
    text = str(caught.value)
    assert "ranks [1]" in text and "finished: [0]" in text
    assert "in a_place_to_hang" in text and "in hang_on" in text
    assert "stacks of rank 0" not in text
    assert len(pids(2)) == 2


@pytest.mark.parametrize("what, said", [("dtype", "float64"), ("gradients", "gradients"), ("group", "process group")])
def test_case_that_leaves_something_fails(what, said):
    with pytest.raises(CaseFailed, match=f"left behind: .*{said}"):
        run(2, leave, what)


def test_surroundings_are_put_back():
    before = run(2, surroundings)
    run(2, change_surroundings)
    assert run(2, surroundings) == before
    assert before[0] == before[1]


def test_what_a_killed_case_started_dies_too(tmp_path):
    with pytest.raises(CaseFailed, match="sleepers started"):
        run(2, start_a_sleeper_then_raise, str(tmp_path))
    assert not wait_until_gone([int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)])


def test_result_that_cannot_travel_is_named():
    with pytest.raises(CaseFailed, match="pickle"):
        run(1, unpicklable)


def test_local_function_is_refused():
    with pytest.raises(TypeError, match="module level"):
        run(1, lambda: None)


def test_death_between_cases_is_told_and_mended():
    victim = pids(2)[1]
    os.kill(victim, signal.SIGKILL)
    assert not wait_until_gone([victim])
    with pytest.warns(UserWarning, match=r"ranks \[1\] died after tests.test_world:identity"):
        assert victim not in pids(2)


def test_stop_all_leaves_nobody():
    before = pids(2)
    world.stop_all()
    assert not wait_until_gone(before)


@pytest.mark.parametrize(
    "signal_number",
    [
        pytest.param(signal.SIGKILL, id="sigkill"),
        pytest.param(signal.SIGTERM, id="sigterm", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, id="sigint", marks=pytest.mark.slow),
    ],
)
def test_no_orphans_when_the_parent_ends(signal_number, tmp_path):
    """Ranks in the middle of a case die with their parent, whatever ends it."""
    parent = subprocess.Popen(
        [sys.executable, "-c", f"from tests import test_world; test_world.hang_a_world({str(tmp_path)!r})"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / f"{kind}{rank}" for rank in range(2) for kind in ("rank", "sleeper")]
    end = time.monotonic() + 60
    while time.monotonic() < end and not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.1)
    family = [int(file.read_text()) for file in files]
    assert all(is_running(pid) for pid in family)
    parent.send_signal(signal_number)
    parent.wait(20)
    assert not wait_until_gone(family)


def hang_a_world(folder):
    run(2, write_pids_and_hang, folder, timeout=500)


def write_pids_and_hang(folder):
    rank = dist.get_rank()
    Path(folder, f"sleeper{rank}").write_text(str(start_a_sleeper()))
    Path(folder, f"rank{rank}").write_text(str(os.getpid()))
    a_place_to_hang()
