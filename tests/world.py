"""Worlds of gloo processes for tests: started once per session and size, reused, respawned after a failure.

For example, in a test module:

    def case(scale):                      # at module level of a test module
        x = torch.ones(2) * scale * dist.get_rank()
        dist.all_reduce(x)
        return x

    def test_sum():
        assert [x.tolist() for x in run(2, case, 3.0)] == [[3.0, 3.0]] * 2
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from tests import world_rank

START_TIMEOUT = 120.0  # seconds for the processes of a world to meet
IMPORT_TIMEOUT = 120.0  # seconds for a case's module to be imported; not on the case's own clock
GRACE = 0.5  # seconds in which more failures are collected after a first one
GRACE_LOST_PEER = 5.0  # the same while all that is known is that somebody's peer went away
# A process group that a case made is not destroyed: code under test may keep sub-groups of the world for good. Each costs
# three threads and a socket per peer and slows the making of the next, so a world with more than this many is replaced.
GROUPS_KEPT = 64
LOST_PEER = re.compile(r"connection (closed|reset|refused)|broken pipe|socket closed|peer closed", re.IGNORECASE)

_worlds: dict[int, World] = {}


@dataclass
class Failure:
    """One rank's end. `seconds` is on the monotonic clock, which the processes of a machine share."""

    rank: int
    seconds: float
    kind: str  # the exception's type name, or "died"
    message: str
    traceback: str

    @property
    def is_echo(self) -> bool:
        """True for an error that only says that another rank has gone."""
        return self.kind != "died" and LOST_PEER.search(self.traceback) is not None


class CaseFailed(AssertionError):
    """A case failed in its world. `rank`, `kind` and `message` tell the first cause; rank None: the case hung."""

    def __init__(self, text: str, rank: int | None, kind: str, message: str) -> None:
        super().__init__(text)
        self.rank, self.kind, self.message = rank, kind, message


def run(size: int, function: Callable, *args: Any, timeout: float = 30.0, **kwargs: Any) -> list[Any]:
    """Calls `function(*args, **kwargs)` on each rank of a world of `size` gloo processes; returns the results by rank.

    `function` is at module level of an importable module; arguments and results are pickled. `timeout`: seconds for
    the case, after imports. Seeds are reset before each case; environment and working folder are put back after it.

    Raises:
        CaseFailed: a rank raised or died, or the clock ran out. That world is killed; the next call starts a fresh one.
        TypeError: the function cannot be found by its name in another process.
    """
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        name = f"{function.__module__}.{function.__qualname__}"
        raise TypeError(f"{name}: a case must stand at module level of a test module")
    if timeout >= world_rank.GROUP_TIMEOUT:
        raise ValueError(f"timeout={timeout}: must be below the process group's own {world_rank.GROUP_TIMEOUT:g} s")
    request = pickle.dumps((function.__module__, function.__qualname__, sys.path, pickle.dumps((args, kwargs))))
    world = _worlds.get(size)
    if world is not None and world.dead_ranks():
        warnings.warn(f"ranks {world.dead_ranks()} died after {world.last_case} had finished; world respawned")
        world.kill()
    if size not in _worlds:
        _worlds[size] = World(size)
    return _worlds[size].run(request, f"{function.__module__}:{function.__qualname__}", timeout)


def stop_all() -> None:
    """Ends every world of this process."""
    for world in list(_worlds.values()):
        world.kill()


def _is_running(process) -> bool:
    """Whether a rank lives: the system is asked too, since the forkserver tells of a death a little later."""
    try:
        return process.is_alive() and psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class World:
    """`size` processes that share one gloo group. The forkserver has torch loaded, so a process costs milliseconds."""

    def __init__(self, size: int) -> None:
        self.size, self.last_case = size, "its start"
        self.folder = tempfile.mkdtemp(prefix=f"world{size}-")
        context = multiprocessing.get_context("forkserver")
        preload = ["numpy", "pytest", "torch", "torch.distributed", "torch.distributed.device_mesh"]
        # Only what this process could import: an import error in the forkserver would end it.
        # What the test modules import anyway is imported once, not in every rank of every world.
        shared = ["parallel_attn", "parallel_attn.training", "hydra"]
        context.set_forkserver_preload(preload + [name for name in shared if name in sys.modules])
        self.processes, self.connections = [], []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=world_rank.serve, args=(rank, size, self.folder, theirs), name=f"world{size}-rank{rank}"
                )
                process.start()
                theirs.close()  # only the rank holds it now, so its end is seen
                self.processes.append(process)
                self.connections.append(ours)
            self._collect("the start of the world", world_rank.READY, time.monotonic() + START_TIMEOUT)
        except BaseException:  # also Ctrl-C and pytest's own timeout: no process may be left
            self.kill()
            raise

    def run(self, request: bytes, case: str, timeout: float) -> list[Any]:
        try:
            for connection in self.connections:
                try:
                    connection.send_bytes(request)
                except BrokenPipeError:
                    pass  # that rank has just died: collecting says how
            self._collect(case, world_rank.STARTED, time.monotonic() + IMPORT_TIMEOUT)
            done = self._collect(case, world_rank.DONE, time.monotonic() + timeout)
        except BaseException:  # also Ctrl-C and pytest's own timeout: a world in the middle of a case is of no more use
            self.kill()
            raise
        self.last_case = case
        results, groups = zip(*(pickle.loads(answer[1:]) for answer in done))
        if max(groups) > GROUPS_KEPT:
            self.kill()
        return list(results)

    def dead_ranks(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if not _is_running(process)]

    def kill(self) -> None:
        """Ends all ranks and what they started, and removes the world from those in use."""
        if _worlds.get(self.size) is self:
            del _worlds[self.size]
        for process in self.processes:
            process.kill()
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # died before it had a group, or nobody is left in it
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _collect(self, case: str, wanted: bytes, deadline: float) -> list[bytes]:
        """Waits for one `wanted` message per rank; returns them raw. Raises CaseFailed with the first cause."""
        answers: dict[int, bytes] = {}
        failures: dict[int, Failure] = {}
        first_failure = None
        while len(answers) + len(failures) < self.size:
            end = deadline
            if failures:
                only_echoes = all(failure.is_echo for failure in failures.values())
                end = min(deadline, first_failure + (GRACE_LOST_PEER if only_echoes else GRACE))
            left = end - time.monotonic()
            waited_for = {}
            for rank in set(range(self.size)) - set(failures):
                waited_for[self.processes[rank].sentinel] = rank
                if rank not in answers:
                    waited_for[self.connections[rank]] = rank
            ready = multiprocessing.connection.wait(list(waited_for), max(left, 0.0))
            if not ready and left <= 0:
                break
            for rank in sorted({waited_for[thing] for thing in ready}):
                self._read(rank, answers, failures)
            if failures and first_failure is None:
                first_failure = time.monotonic()
        if failures:
            raise self._first_cause(case, failures)
        missing = [rank for rank in range(self.size) if rank not in answers]
        if missing:
            raise self._hang(case, wanted, missing, answers)
        return [answers[rank] for rank in range(self.size)]

    def _read(self, rank: int, answers: dict[int, bytes], failures: dict[int, Failure]) -> None:
        """Takes one message of a rank that has something to say, or notes its death."""
        connection, process = self.connections[rank], self.processes[rank]
        try:
            if rank not in answers and connection.poll():
                raw = connection.recv_bytes()
                if raw[:1] == world_rank.FAILED:
                    failures[rank] = Failure(rank, *pickle.loads(raw[1:]))
                else:
                    answers[rank] = raw
                return
        except (EOFError, ConnectionResetError):
            process.join(5)  # its end of the pipe is gone before its exit code is known
        if process.is_alive():
            return
        answers.pop(rank, None)
        failures[rank] = Failure(rank, time.monotonic(), "died", _how_it_died(process.exitcode), "")

    def _first_cause(self, case: str, failures: dict[int, Failure]) -> CaseFailed:
        causes = [failure for failure in failures.values() if not failure.is_echo] or list(failures.values())
        first = min(causes, key=lambda failure: failure.seconds)
        lines = [f"{case}: rank {first.rank} of {self.size}: {first.kind}: {first.message}", first.traceback.rstrip()]
        for other in sorted(failures.values(), key=lambda failure: failure.seconds):
            if other is not first:
                lines.append(f"later, rank {other.rank}: {other.kind}: {other.message}")
        return CaseFailed("\n".join(line for line in lines if line), first.rank, first.kind, first.message)

    def _hang(self, case: str, wanted: bytes, missing: list[int], answers: dict[int, bytes]) -> CaseFailed:
        word = {world_rank.READY: "ready", world_rank.STARTED: "imported", world_rank.DONE: "finished"}[wanted]
        message = f"not {word} in time: ranks {missing}; {word}: {sorted(answers)}"
        lines = [f"{case}: {message}"]
        for rank in missing:
            lines += [f"--- stacks of rank {rank} (innermost frame first)", self._stacks(rank)]
        return CaseFailed("\n".join(lines), None, "hang", message)

    def _stacks(self, rank: int) -> str:
        """The Python stacks of a living rank, written by its faulthandler, whatever it is stuck in."""
        file = os.path.join(self.folder, f"stack{rank}")
        if not os.path.exists(file):
            return "(not yet able to show them)"
        try:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "(has just died)"
        text, end = "", time.monotonic() + 3.0
        while time.monotonic() < end:
            time.sleep(0.1)
            with open(file) as stream:
                before, text = text, stream.read()
            if text and text == before:
                break
        return text.rstrip() or "(the process did not answer the signal)"


def _how_it_died(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name} before it had finished"
    return f"exited with code {exitcode} before it had finished"


atexit.register(stop_all)
