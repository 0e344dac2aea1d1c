"""Plain values from every rank to every rank, over a process group of their own on the host."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from parallel_attn.mesh import AxisGroup


class Exchange:
    """Gathers small JSON values over all ranks of an axis. With a gloo group of its own it may run in a thread beside
    training, and never waits for a device. Making it is a collective over the world."""

    def __init__(self, world: AxisGroup) -> None:
        self.rank, self.degree = world.rank, world.degree
        self._group = dist.new_group(backend="gloo") if world.degree > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Raises RuntimeError when a peer is gone."""
        if self._group is None:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.degree)]
        dist.all_gather(sizes, torch.tensor(len(content)), group=self._group)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = content
        contents = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.degree)]
        dist.all_gather(contents, padded, group=self._group)
        return [json.loads(bytes(text[: int(size)].numpy())) for text, size in zip(contents, sizes)]

    def first_problem(self, problem: str | None) -> str | None:
        """The problem of the first rank that has one, on every rank; None when nobody has."""
        found = [(rank, text) for rank, text in enumerate(self.gather(problem)) if text]
        if not found:
            return None
        rank, text = found[0]
        return text if all(other == text for _, other in found) and len(found) == self.degree else f"rank {rank}: {text}"

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
