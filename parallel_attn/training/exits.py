"""How a rank ends on an error: one line from one rank, or a traceback from the rank that failed first."""

from __future__ import annotations

import sys
import time
import traceback
from typing import NoReturn

from parallel_attn import mesh as meshes
from parallel_attn.errors import Interrupted, PeerLost, SettingsError

SETTINGS_EXIT, FAILED_EXIT = 2, 1
GRACE_SECONDS = 5.0
"""How long the other ranks let local rank 0 speak first; the launcher ends them meanwhile."""


def leave_with_line(error: Exception, where: str = "") -> NoReturn:
    """For an error that all ranks share: local rank 0 prints one line. Another rank, if it is still there after a while,
    was alone with it and prints it too."""
    rank, local_rank, _ = meshes.launcher_ranks()
    if local_rank != 0:
        time.sleep(GRACE_SECONDS)
    _record(error)
    alone = f" (rank {rank})" if local_rank != 0 else ""
    print(f"error{alone}: {where}{error}", file=sys.stderr, flush=True)
    leave(exit_code(error))


def leave_with_traceback(error: Exception, where: str = "") -> NoReturn:
    """For an error of this rank alone, or one that nobody foresaw. `where` names the job of a sweep."""
    rank = meshes.launcher_ranks()[0]
    if isinstance(error, PeerLost):
        # The launcher ends this rank while it waits. Whoever is still here was not told: then its own trace matters.
        time.sleep(2 * GRACE_SECONDS)
    _record(error)
    text = "".join(traceback.format_exception(error))
    print(f"error on rank {rank}: {where}\n{text}", file=sys.stderr, flush=True)
    leave(FAILED_EXIT)


def leave_interrupted(error: Interrupted) -> NoReturn:
    """For a signal: one line from local rank 0, and the code that a shell gives to a process ended by it."""
    if meshes.launcher_ranks()[1] == 0:
        print(f"interrupted: {error}", file=sys.stderr, flush=True)
    leave(exit_code(error))


def _record(error: Exception) -> None:
    """Leaves the cause where torchrun looks for it, so that its own summary names it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def exit_code(error: BaseException) -> int:
    if isinstance(error, Interrupted):
        return 128 + error.signal
    return SETTINGS_EXIT if isinstance(error, SettingsError) else FAILED_EXIT


def leave(code: int) -> NoReturn:
    """Ends the process without the barrier of a clean shutdown: the peers may not come."""
    sys.stdout.flush()
    sys.exit(code)
