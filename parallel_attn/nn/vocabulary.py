"""Embedding and output head, split over the vocabulary. Shapes: B batch, S sequence, D width, V vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_attn.collectives import reduce
from parallel_attn.initialization import Initializer, normal
from parallel_attn.nn.linear import ColumnParallelLinear
from parallel_attn.nn.module import Placement, ShardedModule
from parallel_attn.sharding import split_evenly


class VocabParallelEmbedding(ShardedModule):
    """Rows of the table (V, D) are split over the tensor axis, unevenly where V does not divide: no padded rows.

    Raises SettingsError when V is less than the degree.
    """

    def __init__(
        self, placement: Placement, vocab_size: int, hidden_size: int, *, initializer: Initializer | None = None
    ) -> None:
        super().__init__(placement)
        self.vocab_size = vocab_size
        self.ranges = split_evenly(vocab_size, self.tensor_axis.degree, what="model.vocab_size")
        self.new_parameter(
            "weight", (vocab_size, hidden_size), initializer or normal(0.02), dim=0, ranges=self.ranges, decay=True
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) -> (B, S, D), replicated. An id outside the vocabulary fails an (asynchronous) assertion."""
        # Without the check an id that no rank holds would come back as zeros from all of them.
        torch._assert_async(((tokens >= 0) & (tokens < self.vocab_size)).all(), "a token id is outside the vocabulary")
        start, stop = self.ranges[self.tensor_axis.rank]
        if self.tensor_axis.degree == 1:
            return F.embedding(tokens, self.weight)
        elsewhere = (tokens < start) | (tokens >= stop)
        rows = F.embedding((tokens - start).masked_fill(elsewhere, 0), self.weight)
        return reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.tensor_axis)


def output_head(
    placement: Placement, hidden_size: int, vocab_size: int, *, tied_to: VocabParallelEmbedding | None = None
) -> ColumnParallelLinear:
    """The head D -> V, split like the embedding; `tied_to` an embedding it holds the same Parameter."""
    ranges = split_evenly(vocab_size, placement.tensor.degree, what="model.vocab_size")
    if tied_to is None:
        return ColumnParallelLinear(placement, hidden_size, vocab_size, ranges, initializer=normal(0.02))
    head = ColumnParallelLinear(replace(placement, device="meta"), hidden_size, vocab_size, ranges)
    head.weight = tied_to.weight
    return head
