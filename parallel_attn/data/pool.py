"""Processes that tokenise beside this one.

They are fresh interpreters started by hand: a fork would copy the threads' locks of this process, and multiprocessing's
"spawn" would run the user's script again in each of them. They end when this process does, however it ends, because
their pipe does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from parallel_attn.data.tokenizer import Tokenizer
from parallel_attn.errors import SettingsError

START = """
import json, sys, types
sys.path[:], bare = json.loads(sys.argv[1])
for name, folders in bare.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = folders
from parallel_attn.data.worker import main
main()
"""
POLL_SECONDS = 0.5


class Pool:
    """`size` processes that hold the same tokenizer; a context manager."""

    def __init__(self, tokenizer: Tokenizer, size: int):
        """Raises SettingsError for a tokenizer whose class lives in the script: no other process can import it."""
        cls = type(tokenizer)
        if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
            raise SettingsError(
                f"data.num_workers={size}: other processes cannot import {cls.__qualname__}; 0 works, "
                "or move it into a module"
            )
        self.size = size
        hello = (cls.__module__, cls.__qualname__, tokenizer.to_json(), tokenizer.end_of_text)
        self._workers: list[tuple[subprocess.Popen, Connection]] = []
        for _ in range(size):
            self._workers.append(_start(_bare_packages(cls)))
        for index in range(size):
            self._send(index, hello)

    def map(self, tasks: Iterable[Any], waiting: Callable[[], None]) -> Iterator[Any]:
        """Results of the tasks in their order. waiting(): called now and then while there is nothing to do.

        Each process has one task at a time and is asked in turn: so order needs no sorting, memory is a task per
        process, and no two sides ever write into a full pipe. Raises SettingsError: a worker's own, or that one has
        died.
        """
        sent = received = 0
        for task in tasks:
            if sent - received == self.size:
                yield self._receive(received % self.size, waiting)
                received += 1
            self._send(sent % self.size, task)
            sent += 1
        while received < sent:
            yield self._receive(received % self.size, waiting)
            received += 1

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error) -> None:
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.terminate()
        for process, _ in self._workers:
            process.wait()

    def _send(self, index: int, value: Any) -> None:
        try:
            self._workers[index][1].send(value)
        except OSError as error:  # the pipe has no other end any more
            raise self._died(index) from error

    def _receive(self, index: int, waiting: Callable[[], None]) -> Any:
        pipe = self._workers[index][1]
        try:
            while not pipe.poll(POLL_SECONDS):
                waiting()
            failure, result = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died(index) from error
        if failure is not None:
            raise SettingsError(failure)
        return result

    def _died(self, index: int) -> SettingsError:
        code = self._workers[index][0].wait()
        how = f"was killed by signal {-code} (out of memory?); fewer work" if code < 0 else f"ended with code {code}"
        return SettingsError(f"data.num_workers={self.size}: a tokenising process {how}; 0 works in this process")


def _bare_packages(cls: type) -> dict[str, list[str]]:
    """Packages of ours that a worker enters without running their `__init__`, which would bring torch: seconds and some
    200 MB for each process, and nothing in tokenising needs it. A class from elsewhere may import whatever it likes."""
    names = [__name__.split(".")[0], __package__]
    if not cls.__module__.startswith(f"{__package__}."):
        return {}
    return {name: [os.path.abspath(folder) for folder in sys.modules[name].__path__] for name in names}


def _start(bare: dict[str, list[str]]) -> tuple[subprocess.Popen, Connection]:
    ours, theirs = socket.socketpair()
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    where = json.dumps([[os.path.abspath(entry) for entry in sys.path], bare])
    command = [sys.executable, "-c", START, where, str(os.getpid()), str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    return process, Connection(ours.detach())
