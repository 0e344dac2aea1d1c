"""Who hangs: a thread on every rank that notices when the job makes no progress, and names the rank that is behind.

Every rank counts the places that its training loop passes, which are the same on all ranks. A rank that hangs stays at
its place, the others wait for it in a collective at a later one or the same. The counts travel through the store of
the process group, by a connection of their own: no collective is needed to find out why a collective does not end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist

from parallel_attn.mesh import Mesh
from parallel_attn.training import exits

PARENT_SECONDS = 0.5
DUMP_SECONDS = 3.0
"""How long the rank that hangs is given to show its stack."""
_numbers: dict[object, int] = {}


class Hang(RuntimeError):
    """A rank makes no progress; the message names it and the place."""


class Watchdog:
    """A context manager around a training loop. `at(place)` is called by the loop, `tick()` by work in other threads.

    timeout: seconds without any progress of any rank (or without a sign of life of one) after which the first rank says
    who is behind and ends; the launcher ends the others. 0 is never. If the launcher itself has gone, this process gets a
    SIGTERM: it saves and ends instead of training on with nobody to stop it.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self.rank, self.degree, self.timeout = mesh.world.rank, mesh.world.degree, timeout
        self.interval = max(0.05, min(2.0, timeout / 10)) if timeout else PARENT_SECONDS
        self._count, self._ticks, self._place = 0, 0, "the start"
        self._over = threading.Event()
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        key = dist.group.WORLD
        _numbers[key] = _numbers.get(key, 0) + 1  # the jobs of a sweep share a store
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the launcher's store outlives an attempt
        self._prefix = f"watchdog/{attempt}/{_numbers[key]}"
        self._store = dist.distributed_c10d._get_default_store().clone() if timeout and self.degree > 1 else None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.timeout or self._parent is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if error is None and self._thread.is_alive():
            self._thread.join(5.0)  # it may be talking to a store that is gone

    def at(self, place: str) -> None:
        """The loop is about to do this."""
        self._place = place
        self._count += 1

    def tick(self) -> None:
        """Something goes on, if not the loop itself."""
        self._ticks += 1

    # in the thread

    def _watch(self) -> None:
        looked = last_parent = time.monotonic()
        seen: dict[int, tuple] = {}
        changed, alive = looked, {}
        beats = 0
        while not self._over.wait(min(self.interval, PARENT_SECONDS)):
            now = time.monotonic()
            if self._parent is not None and os.getppid() != self._parent:
                print("the launcher is gone: ending as on SIGTERM", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                self._parent = None
            if not self.timeout or now - last_parent < self.interval:
                continue
            last_parent = now
            if now - looked > 3 * self.interval + 5.0:  # this whole process stood still (Ctrl-Z, a sleeping laptop)
                changed, alive = now, dict.fromkeys(alive, now)
            looked = now
            beats += 1
            reports = self._reports(beats)
            for rank, report in reports.items():
                if rank not in seen or seen[rank][:2] != tuple(report[:2]):
                    changed = now
                if rank not in seen or seen[rank][3] != report[3]:
                    alive[rank] = now
                seen[rank] = tuple(report)
            silent = [rank for rank, time_seen in alive.items() if now - time_seen > self.timeout]
            if silent and self.rank != silent[0]:
                self._end(silent, "gives no sign of life", seen)
            if self.rank == 0 and now - changed > self.timeout:
                least = min(report[0] for report in seen.values())
                behind = [rank for rank, report in seen.items() if report[0] == least]
                self._end(behind, f"hangs in {seen[behind[0]][2]}", seen)

    def _reports(self, beats: int) -> dict[int, list]:
        """(count, ticks, place, beats) of the ranks that this one watches: the first all, the second the first."""
        mine = [self._count, self._ticks, self._place, beats]
        if self._store is None:
            return {self.rank: mine}
        try:
            self._store.set(f"{self._prefix}/{self.rank}", json.dumps(mine))
            if self._store.check([f"{self._prefix}/dump/{self.rank}"]):
                self._show_stack()
            watched = {0: range(1, self.degree), 1: range(1)}.get(self.rank, range(0))
            keys = {rank: f"{self._prefix}/{rank}" for rank in watched}
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
            texts = self._store.multi_get(list(keys.values())) if keys else []
        except RuntimeError:  # the store is gone with its launcher, which has been seen
            return {self.rank: mine}
        return {self.rank: mine} | {rank: json.loads(text) for rank, text in zip(keys, texts)}

    def _end(self, ranks: list[int], what: str, seen: dict[int, tuple]) -> None:
        some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        who = f"rank{'s' * (len(ranks) > 1)} {some}"
        if len(ranks) == self.degree > 1:
            who = "every rank"
        others = "" if len(ranks) == self.degree else ", the others wait for it"
        line = f"{who} {what}: no progress for {self.timeout:g} s (train.hang_timeout){others}"
        print(f"error: {line}", file=sys.stderr, flush=True)
        exits._record(Hang(line))
        if self.rank in ranks:
            self._show_stack()
        elif self._store is not None:
            try:
                self._store.set(f"{self._prefix}/dump/{ranks[0]}", "1")
            except RuntimeError:
                pass
            time.sleep(min(DUMP_SECONDS, self.interval + 1.0))
        os._exit(exits.FAILED_EXIT)

    def _show_stack(self) -> None:
        print(f"rank {self.rank} is here:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()
