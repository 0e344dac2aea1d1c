"""What a model costs, from its parameter records and its types' declarations."""

from __future__ import annotations

import math

from torch import nn

from parallel_attn.attention.base import Attention
from parallel_attn.models import LanguageModel
from parallel_attn.nn.module import parameter_shards


def full_parameters(model: nn.Module) -> int:
    """Parameters of the model as one process would hold it; the same number at every degree."""
    return sum(shard.full_elements() for shard in parameter_shards(model).values())


def local_parameters(model: nn.Module, rank: int | None = None) -> int:
    """Parameters that tensor rank `rank` (default: this one) holds; an engine may shard them further over the replicas."""
    return sum(math.prod(shard.local_shape(rank)) for shard in parameter_shards(model).values())


def train_flops_per_token(model: LanguageModel, seq_len: int) -> int:
    """Model FLOPs of forward and backward per token of a sample, of the whole model (all tensor ranks together).

    6 per weight of a matrix that multiplies and token that passes through it (Kaplan 2020, table 1; an embedding table
    that is only looked up counts nothing, a tied one once), plus 3 x the forward of the attention core over the keys that
    a query sees in the mean: (S + 1) / 2 where it is causal, T for an encoder or a cross attention over T tokens, fewer
    with a window. Recomputation is not counted.
    """
    tokens = {module: count for part, count in model.tokens_through(seq_len) for module in part.modules()}
    memory, total = model.context_tokens(seq_len), 0.0
    for module, count in tokens.items():
        if getattr(module, "multiplies_input", False):
            total += 6 * module.shards["weight"].full_elements() * count
        if isinstance(module, Attention):
            total += 3 * module.core_flops_per_token(1) * module.mean_keys(count, memory) * count
    return round(total / seq_len)
