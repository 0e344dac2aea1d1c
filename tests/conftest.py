"""What every test stands on: quiet libraries, a cache of the session's own, `--all`, and worlds that end with the session."""

import os
import shutil
import signal
import tempfile

import pytest

# Before torch is imported anywhere, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share few cores
os.environ["WANDB_SILENT"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.mkdtemp(prefix="parallel-attn-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # One cache for the session, and one for each of its workers: the tokens of the default corpus are made once, and never
    # found from an older version.
    os.environ["XDG_CACHE_HOME"] = folder
    # Started in the background by a script, this process ignores SIGINT, and so would every process that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A developer's W&B account must not receive the runs of tests.
    os.environ.pop("WANDB_API_KEY", None)
    os.environ["NETRC"] = os.path.join(folder, "no-netrc")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The long ones first: of two workers none then waits for the other's last test.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if config.getoption("--all"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)


def pytest_unconfigure(config: pytest.Config) -> None:
    from tests import world

    world.stop_all()
