"""Plain values from every rank to every rank, over a process group of their own on the host."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel_attn.mesh import AxisGroup


_groups: dict[tuple[dist.ProcessGroup, str], dist.ProcessGroup] = {}


class Exchange:
    """Gathers small JSON values over all ranks, on the host: it never waits for a device.

    Each purpose has a gloo group of its own, so that it may be used in a thread beside training. The first one of a
    purpose is a collective over the world; later ones (the jobs of a sweep) share its group.
    timeout: how long a rank waits for the others, set by the first one of a purpose; None: 30 minutes.
    """

    def __init__(self, world: AxisGroup, purpose: str = "control", timeout: timedelta | None = None) -> None:
        self.rank, self.degree = world.rank, world.degree
        self.group: dist.ProcessGroup | None = None
        if world.degree > 1:
            key = world.group, purpose
            if key not in _groups:
                _groups[key] = dist.new_group(backend="gloo", timeout=timeout)
            self.group = _groups[key]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Raises RuntimeError when a peer is gone."""
        if self.group is None:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.degree)]
        dist.all_gather(sizes, torch.tensor(len(content)), group=self.group)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = content
        contents = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.degree)]
        dist.all_gather(contents, padded, group=self.group)
        return [json.loads(bytes(text[: int(size)].numpy())) for text, size in zip(contents, sizes)]
