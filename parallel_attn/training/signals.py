"""SIGTERM and SIGINT as a request to end in order: at the next optimizer step, or at once where nothing would be lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from parallel_attn import mesh as meshes
from parallel_attn.errors import Interrupted, PeerLost

MOMENT_SECONDS = 2.0
"""What a rank whose peer has gone gives to a signal that is on its way: a launcher signals its ranks one by one."""
INSIST_SECONDS = 1.0
"""A second SIGINT counts as impatience after this long; before, it is the same one, sent twice (to a process group)."""


class Signals:
    """A context manager that takes SIGTERM and SIGINT while it lasts and gives them back afterwards.

    Outside `held()` a signal raises Interrupted where the main thread is. Inside it is only noted in `requested`: whoever
    holds looks there and ends (a training loop: once all ranks have agreed on a step). A signal that was ignored when
    this began (SIGINT of a job in the background) stays ignored. In another thread than the main one, and when it is not
    entered at all, nothing is taken: `requested` stays None.
    """

    def __init__(self, taken: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self.taken = tuple(taken)
        self.requested: signal.Signals | None = None
        """The first signal that came."""
        self._since = 0.0
        self._holders = 0
        self._settled: PeerLost | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in self.taken:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, signals are noted. A second SIGINT raises all the same."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1

    def check(self) -> None:
        """Raises Interrupted if a signal was noted: for places where this rank may end alone."""
        if self.requested is not None:
            raise Interrupted(self.requested)

    def flags(self) -> list[float]:
        """One number per signal in `taken`, 1 for the one that was requested here: to be summed over all ranks."""
        return [float(number == self.requested) for number in self.taken]

    def agreed(self, sums: Sequence[float]) -> signal.Signals | None:
        """The signal that some rank was asked by, from the sums of all ranks' `flags()`: the same on every rank."""
        return next((number for number, count in zip(self.taken, sums) if count), None)

    @contextmanager
    def peers_expected(self) -> Iterator[None]:
        """Turns the loss of a peer into Interrupted when a signal is the cause of it, else into PeerLost.

        A peer may have had the signal, and left, before it got here: it is waited for. But a launcher also ends the
        ranks that are left by SIGTERM when one has failed; so a SIGTERM that comes after the loss is not its cause.
        """
        try:
            with meshes.peers_expected():
                yield
        except PeerLost as error:
            with self.held():
                if error is not self._settled and self._comes_after_all():
                    raise Interrupted(self.requested) from error
                self._settled = error  # an outer one, reached after a teardown, must not look again
                raise

    def _comes_after_all(self) -> bool:
        end = time.monotonic() + MOMENT_SECONDS
        before = self.requested
        while self.requested is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.requested is not None and self.requested in (before, signal.SIGINT)

    def _arrived(self, number: int, frame: object) -> None:
        first = self.requested is None
        if first:
            self.requested, self._since = signal.Signals(number), time.monotonic()
        insists = not first and number == signal.SIGINT and time.monotonic() - self._since > INSIST_SECONDS
        if insists or not self._holders:
            raise Interrupted(self.requested)
