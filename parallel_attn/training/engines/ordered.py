"""Sums over replicas in one order, whatever the back end, the buckets and the place of an element in them."""

# No `from __future__ import annotations` here: DDP looks at a hook's annotations and takes no strings.

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_attn.mesh import AxisGroup


def average_in_rank_order(replicas: AxisGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for DDP: the mean over the replicas, every element added up from the first rank to the last.

    An all-reduce adds in an order that depends on where an element lies: it differs between tensor ranks, whose shards
    have other sizes, and after DDP has rebuilt its buckets. From three replicas on that is another rounding. As many bytes
    travel as in a ring.
    """
    flat, degree = bucket.buffer(), replicas.degree
    size = -(-flat.numel() // degree)
    padded = torch.nn.functional.pad(flat, (0, size * degree - flat.numel()))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=replicas.group)
    total, *others = received.view(degree, size).unbind()
    for other in others:
        total = total + other
    dist.all_gather_into_tensor(padded, total / degree, group=replicas.group)
    flat.copy_(padded[: flat.numel()])
    done = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    done.set_result(flat)
    return done
