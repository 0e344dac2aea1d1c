"""What a model costs, from its parameter records and its types' declarations."""

from __future__ import annotations

import math

from torch import nn

from parallel_attn.attention.base import Attention
from parallel_attn.nn.module import parameter_shards


def full_parameters(model: nn.Module) -> int:
    """Parameters of the model as one process would hold it; the same number at every degree."""
    return sum(shard.full_elements() for shard in parameter_shards(model).values())


def local_parameters(model: nn.Module, rank: int | None = None) -> int:
    """Parameters that tensor rank `rank` (default: this one) holds; an engine may shard them further over the replicas."""
    return sum(math.prod(shard.local_shape(rank)) for shard in parameter_shards(model).values())


def train_flops_per_token(model: nn.Module, seq_len: int) -> int:
    """Model FLOPs of forward and backward per token, of the whole model (all tensor ranks together).

    6 per weight of a matrix that multiplies (Kaplan 2020, table 1; an embedding table that is only looked up counts
    nothing, a tied one once), plus 3 x the forward of the attention core over the mean causal context (S + 1) / 2.
    Recomputation is not counted.
    """
    multiplied = 0
    for name, module in model.named_modules():
        if getattr(module, "multiplies_input", False):
            multiplied += module.shards["weight"].full_elements()
    core = sum(m.core_flops_per_token(1) for m in model.modules() if isinstance(m, Attention))
    mean_context = (seq_len + 1) / 2
    return round(6 * multiplied + 3 * core * mean_context)
