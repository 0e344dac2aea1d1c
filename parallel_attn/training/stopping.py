"""Ending in the middle of an accumulation: all ranks at the same micro batch, without waiting for each other."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from parallel_attn.checkpoint import Exchange
from parallel_attn.data import Batch
from parallel_attn.mesh import Mesh
from parallel_attn.training.signals import Signals


class Abandoned(Exception):
    """All ranks leave an optimizer step at the same micro batch: `signal` has asked for it. Nothing was updated."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class Agreement:
    """Before each micro batch the ranks learn whether one of them was signalled before the last one.

    The question is asked at one micro batch and the answer read at the next, so that nobody waits for it; it travels on
    the host, so that no device is waited for either.
    """

    def __init__(self, signals: Signals, mesh: Mesh) -> None:
        self.signals = signals
        self._group = Exchange(mesh.world, "stopping").group
        self._flags: torch.Tensor | None = None
        self._asked: dist.Work | None = None

    def __call__(self, index: int) -> None:
        """To be called before every micro batch, by all ranks. Raises Abandoned."""
        if self._group is None:
            if self.signals.requested is not None:
                raise Abandoned(self.signals.requested)
            return
        if self._asked is not None:
            self._asked.wait()
            number = self.signals.agreed(self._flags.tolist())
            if number is not None:
                raise Abandoned(number)
        self._flags = torch.tensor(self.signals.flags())
        self._asked = dist.all_reduce(self._flags, group=self._group, async_op=True)


class Paced(Sequence[Batch]):
    """Batches that call `before(index)` as each of them is taken."""

    def __init__(self, batches: Sequence[Batch], before: Callable[[int], None]) -> None:
        self._batches, self._before = batches, before

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self._batches):
            self._before(index)
            yield batch
