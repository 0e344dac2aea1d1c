"""Keeps W&B's own exit hook from holding the process when its service hangs."""

import atexit
import threading

# W&B's exit hook waits for its service process without limit; this is how long it gets.
TEARDOWN_SECONDS = 8.0

_registered = threading.Lock()  # taken once per process and never released
_exiting, _torn_down = threading.Event(), threading.Event()


def teardown_before_exit() -> None:
    """Registers, once per process, a bounded end of W&B's service at exit.

    Call it after `wandb.setup()`: exit hooks run last in, first out, so that this one comes before W&B's own.
    """
    if _registered.acquire(blocking=False):
        # Started now: newer Pythons refuse to start a thread while the interpreter ends.
        threading.Thread(target=_watch, name="wandb-exit-watch", daemon=True).start()
        atexit.register(_teardown)


def _teardown() -> None:
    import wandb

    _exiting.set()
    try:
        wandb.teardown()
    # The service may have been killed under it; whatever that raises, the process is ending and the run is on disk.
    except Exception:
        return
    finally:
        _torn_down.set()


def _watch() -> None:
    _exiting.wait()
    if not _torn_down.wait(TEARDOWN_SECONDS):
        _kill_service()


def _kill_service() -> None:
    """Kills the service process that W&B started as a child of this process; its records stay on disk."""
    import psutil

    for child in psutil.Process().children():
        try:
            if child.name().startswith("wandb-core"):
                child.kill()
        except psutil.NoSuchProcess:
            continue
