"""Signals end a run in order: on all ranks after the same step, with their name in summary.json."""

import json
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from parallel_attn.data import TrainBatches
from parallel_attn.errors import Interrupted, PeerLost
from parallel_attn.training import pretrain
from parallel_attn.training.signals import MOMENT_SECONDS, Signals
from tests.training.composed import SMALL, composed, records
from tests.world import run

TERM, INT = signal.SIGTERM, signal.SIGINT


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_signal_raises_at_once_and_is_given_back(number):
    before = signal.getsignal(TERM), signal.getsignal(INT)
    with pytest.raises(Interrupted) as caught, Signals():
        send(number)
        time.sleep(5)
    assert caught.value.signal == number and str(caught.value) == number.name
    assert (signal.getsignal(TERM), signal.getsignal(INT)) == before


def test_held_signals_are_noted_and_only_impatience_raises(monkeypatch):
    monkeypatch.setattr("parallel_attn.training.signals.INSIST_SECONDS", 0.1)
    with Signals() as signals:
        with pytest.raises(Interrupted, match="SIGTERM"), signals.held():
            send(TERM)
            send(TERM)  # SLURM signals the launcher, which passes it on, and the ranks as well
            send(INT)
            assert signals.requested == TERM
            time.sleep(0.15)
            send(TERM)
            send(INT)
            time.sleep(5)
        with pytest.raises(Interrupted, match="SIGTERM"):
            signals.check()


def test_what_was_ignored_stays_ignored_and_other_threads_take_nothing():
    before = signal.signal(INT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            send(INT)
        assert signals.requested is None and signal.getsignal(INT) is signal.SIG_IGN
    finally:
        signal.signal(INT, before)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(Signals().__enter__()._before))
    thread.start()
    thread.join()
    assert taken == [{}]


def interrupted_case(run_dir: str, where: int, number: int) -> tuple[str, int]:
    """The signal reaches one rank while it makes the batches of its fourth step."""
    step = TrainBatches.step

    def signalled(self, index):
        if index == 3 and dist.get_rank() == where:
            send(number)
        return step(self, index)

    TrainBatches.step = signalled
    overrides = ("train.log_every=1", "eval.every=0", f"run_dir={run_dir}", f"parallel.tensor={dist.get_world_size() // 2 or 1}")
    try:
        with pytest.raises(Interrupted) as caught, Signals() as signals:
            pretrain(composed(*SMALL, *overrides), signals=signals)
    finally:
        TrainBatches.step = step
    return str(caught.value)


@pytest.mark.parametrize("size, where", [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_all_ranks_end_after_the_step_in_which_one_was_signalled(tmp_path, size, where):
    assert run(size, interrupted_case, str(tmp_path / "a"), where, TERM) == ["SIGTERM"] * size
    assert [record["step"] for record in records(tmp_path / "a")] == [1, 2, 3, 4]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["step"]) == ("interrupted", "Interrupted: SIGTERM", 4)


def deserted_case(run_dir: str, number: int, delay: float) -> str:
    """A collective fails as it does when a peer has gone; this rank's own signal comes `delay` seconds later."""
    step = TrainBatches.step

    def deserted(self, index):
        if index == 3:
            timer = threading.Timer(delay, send, [number]) if delay else None
            timer.start() if timer else send(number)
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
        return step(self, index)

    TrainBatches.step = deserted
    try:
        with pytest.raises((Interrupted, PeerLost)) as caught, Signals() as signals:
            pretrain(composed(*SMALL, "eval.every=0", f"run_dir={run_dir}"), signals=signals)
    finally:
        TrainBatches.step = step
    return f"{type(caught.value).__name__} {signals.requested.name}"


@pytest.mark.parametrize(
    "number, delay, status, end",
    [
        (INT, 0.5, "interrupted", "Interrupted SIGINT"),  # Ctrl-C reached the peer first
        (TERM, 0, "interrupted", "Interrupted SIGTERM"),
        (TERM, 0.5, "failed", "PeerLost SIGTERM"),  # a launcher ends the ranks that are left
    ],
)
def test_a_lost_peer_is_not_the_cause_when_a_signal_is_on_its_way(tmp_path, number, delay, status, end):
    assert 2 * delay < MOMENT_SECONDS
    assert run(1, deserted_case, str(tmp_path / "a"), number, delay) == [end]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    cause = "Interrupted: " if status == "interrupted" else "PeerLost: another rank left or died"
    assert summary["status"] == status and summary["error"].startswith(cause)
