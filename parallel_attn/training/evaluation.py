"""Validation: one number per split, whatever the batch size and the number of replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from parallel_attn.collectives import all_reduce
from parallel_attn.data import IGNORE, Batch
from parallel_attn.mesh import Mesh


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], mesh: Mesh) -> dict[str, float]:
    """`val/loss` (nats per target, a token-weighted mean), `val/perplexity`, `val/bits_per_byte`.

    Bits per byte = total nats of all targets / ln 2 / bytes of text that the targets stand for (an end of text stands for
    none): comparable across tokenizers. Label smoothing and z-loss are left out.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # nats, targets, bytes
    for batch in batches:
        batch = batch.to(mesh.device)
        sums[0] += model(batch.tokens, batch.targets, **batch.given()).double()
        sums[1] += (batch.targets != IGNORE).sum()
        sums[2] += batch.target_bytes.sum()
    model.train(was_training)
    nats, count, size = all_reduce(sums, mesh.data).tolist()
    loss = nats / count if count else math.nan
    metrics = {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0)) if loss == loss else math.nan}
    if size:
        metrics["val/bits_per_byte"] = nats / math.log(2) / size
    return metrics
