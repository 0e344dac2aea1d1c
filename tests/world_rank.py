"""One rank of a test world: the child's side of `tests.world`. Runs the cases it is sent until its parent goes away."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import operator
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
import traceback

GROUP_TIMEOUT = 900.0  # seconds; above every case's clock, so that the parent is always the one that names a hang
OPEN_FILES = 8192  # each process group that a case makes keeps its sockets as long as the world lives
READY, STARTED, DONE, FAILED = b"R", b"S", b"D", b"F"
LOCALS_SHOWN = 12
LOCALS_WIDTH = 160


def serve(rank: int, size: int, folder: str, connection: multiprocessing.connection.Connection) -> None:
    """Joins the gloo world over a file in `folder`, then answers each case with one message.

    A message to the parent is one byte that says what it is, and a pickle: READY, STARTED (nothing), DONE (the result and
    the number of process groups that now exist), FAILED (seconds on the monotonic clock, kind, message, traceback).
    """
    gc.freeze()  # or the first collection walks, and so copies, every page shared with the forkserver: 0.3 s per rank
    os.setsid()  # a group of its own: killed together with whatever a case started; Ctrl-C reaches the parent alone
    threading.Thread(target=_die_with_parent, daemon=True, name="die-with-parent").start()
    # Stays open: faulthandler writes to its descriptor.
    stacks = open(os.path.join(folder, f"stack{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:  # negative: no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard) if hard >= 0 else OPEN_FILES, hard))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    # Loopback by name: a machine whose host name does not resolve, or has no network, runs the same.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
        )
    except BaseException as error:  # noqa: BLE001 - the parent is told whatever it was, nothing is swallowed
        connection.send_bytes(_failure(error))
        return
    connection.send_bytes(READY)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(request, connection))


def _answer(request: bytes, connection: multiprocessing.connection.Connection) -> bytes:
    environment, folder = dict(os.environ), os.getcwd()
    try:
        module, qualname, path, arguments = pickle.loads(request)
        sys.path[:] = path
        if module not in sys.modules:
            importlib.import_module(module)
            gc.freeze()  # imported code is never garbage: later collections need not walk it
        function = operator.attrgetter(qualname)(sys.modules[module])
        args, kwargs = pickle.loads(arguments)
        connection.send_bytes(STARTED)
        _reset()
        result = function(*args, **kwargs)
        args = kwargs = None
        left = _left_behind()
        if left:
            raise RuntimeError(f"{module}:{qualname} left behind: {', '.join(left)}")
        # Plain pickle: torch teaches multiprocessing's own pickler to hand over file descriptors instead of values.
        answer = DONE + pickle.dumps((result, _process_groups()))
        result = None
        gc.collect()  # what the case made is gone before it counts as finished
        return answer
    except BaseException as error:  # noqa: BLE001 - a case's SystemExit too: the parent is told, nothing is swallowed
        return _failure(error)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)


def _reset() -> None:
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    # Asked first: the call below imports the inductor, which costs each rank a second.
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


def _left_behind() -> list[str]:
    """What a case has changed that would reach into the next one, in words."""
    import torch
    import torch.distributed as dist

    left = []
    if not dist.is_initialized():
        left.append("a destroyed default process group")
    if torch.get_default_dtype() != torch.float32:
        left.append(f"default dtype {torch.get_default_dtype()}")
    if torch.get_default_device().type != "cpu":
        left.append(f"default device {torch.get_default_device()}")
    if not torch.is_grad_enabled():
        left.append("disabled gradients")
    if torch.get_num_threads() != 1:
        left.append(f"{torch.get_num_threads()} torch threads")
    return left


def _process_groups() -> int:
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)  # no public call counts them


def _failure(error: BaseException) -> bytes:
    seconds = time.monotonic()
    text = "".join(traceback.format_exception(error)) + _locals_of_last_frame(error)
    return FAILED + pickle.dumps((seconds, type(error).__name__, str(error), text))


def _locals_of_last_frame(error: BaseException) -> str:
    """The values at the place of the error: cases run without pytest's assertion rewriting, a bare assert says little."""
    frame = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        pass
    if frame is None:
        return ""
    lines = []
    for name, value in list(frame.f_locals.items())[:LOCALS_SHOWN]:
        try:
            shown = " ".join(repr(value).split())
        # A half-built object's repr may raise anything: the first error must still be told.
        except Exception as problem:  # noqa: BLE001
            shown = f"<repr failed: {type(problem).__name__}>"
        lines.append(f"    {name} = {shown[:LOCALS_WIDTH]}{'...' if len(shown) > LOCALS_WIDTH else ''}\n")
    return "values there:\n" + "".join(lines) if lines else ""


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)
