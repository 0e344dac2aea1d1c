"""A world of gloo processes on this machine, started from a plain command: no launcher, no port, nothing left behind."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from parallel_attn.errors import SettingsError

GRACE_SECONDS = 1.0  # in which more failures are collected: the first to be told need not be the cause
GROUP_TIMEOUT_SECONDS = 300.0  # of a collective: a rank may wait for another one's reference


@dataclass
class Ended:
    """How a rank failed. `seconds` on the monotonic clock, `echo`: it only says that another rank has gone."""

    rank: int
    seconds: float
    kind: str
    message: str
    traceback: str = ""
    echo: bool = False


class RankFailed(RuntimeError):
    """A rank raised or died; the message is the first cause, with its traceback if it has one."""


def run_world(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(*args)` on `size` new processes that share one gloo group; returns rank 0's result.

    `function` stands at module level; arguments and result are pickled between our own processes. All processes are ended
    before this returns or raises, on Ctrl-C too; they end by themselves when this process is killed.

    Raises SettingsError as a rank raised it, RankFailed with the first cause for anything else.
    """
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:  # torch is loaded once for all ranks
        context.set_forkserver_preload(["torch", "torch.distributed", "parallel_attn.training"])
    folder = tempfile.mkdtemp(prefix="parallel-attn-")
    processes, connections = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, size, folder, theirs, function, args), name=f"rank{rank}", daemon=True
            )
            process.start()
            theirs.close()  # only the rank holds it now, so its end is seen
            processes.append(process)
            connections.append(ours)
        return _results(processes, connections)[0]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for connection in connections:
            connection.close()
        shutil.rmtree(folder, ignore_errors=True)


def _results(processes: list, connections: list) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, Ended] = {}
    deadline = None
    while len(results) + len(failures) < len(processes):
        open_ranks = [rank for rank in range(len(processes)) if rank not in results and rank not in failures]
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        waited_for = [connections[rank] for rank in open_ranks]
        ready = multiprocessing.connection.wait(waited_for, left)
        if not ready and deadline is not None:
            break
        for rank in open_ranks:
            if connections[rank] not in ready:
                continue
            try:
                answer = connections[rank].recv()
            except EOFError:
                processes[rank].join(5)  # the end of its pipe is seen before its exit code is known
                answer = Ended(rank, time.monotonic(), "died", _how_it_died(processes[rank].exitcode))
            if isinstance(answer, Ended):
                failures[rank] = answer
            else:
                (results[rank],) = answer
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    if failures:
        causes = [failure for failure in failures.values() if not failure.echo] or list(failures.values())
        first = min(causes, key=lambda failure: failure.seconds)
        if first.kind == SettingsError.__name__:
            raise SettingsError(first.message)
        detail = f"\n{first.traceback}" if first.traceback else ""
        raise RankFailed(f"rank {first.rank} of {len(processes)} {first.kind}: {first.message}{detail}")
    return [results[rank] for rank in range(len(processes))]


def _how_it_died(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exited with code {exitcode}"


def _rank(rank: int, size: int, folder: str, connection, function: Callable, args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent alone answers it
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        answer: Any = (_join_and_call(rank, size, folder, function, args),)
    except BaseException as error:  # noqa: BLE001 - the parent is told whatever it was, nothing is swallowed
        from parallel_attn.mesh import lost_contact

        text = "".join(traceback.format_exception(error))
        answer = Ended(rank, time.monotonic(), type(error).__name__, str(error), text, lost_contact(error))
    connection.send(answer)
    multiprocessing.parent_process().join()  # stays, so that no peer loses a connection; the parent ends it


def _join_and_call(rank: int, size: int, folder: str, function: Callable, args: tuple) -> Any:
    import torch
    import torch.distributed as dist

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # a launcher around us is not ours
        os.environ.pop(name, None)
    # Loopback by name: a machine whose host name does not resolve, or has no network, runs the same.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // size))
    store = dist.FileStore(os.path.join(folder, "store"), size)
    timeout = timedelta(seconds=GROUP_TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return function(*args)


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
