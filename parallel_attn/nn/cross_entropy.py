"""Cross entropy on logits that are split over the vocabulary. N tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_attn.collectives import all_reduce
from parallel_attn.mesh import AxisGroup
from parallel_attn.nn.norm import at_least_float32, refuse_second_derivative
from parallel_attn.sharding import Range

IGNORE = -100


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: AxisGroup,
    ranges: Sequence[Range],
    *,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Per-token losses in nats, 0 where the target is `ignore_index`; float32, or float64 for float64 logits.

    logits (N, V_local) of this rank, targets (N,) over the whole vocabulary, `ranges` each rank's rows of it.
    loss = lse - (1 - s) logit[target] - s / V sum(logits) + z lse^2, with s = `label_smoothing` (Szegedy 2016, section 7)
    and z = `z_loss` (PaLM, section 5), both over the whole vocabulary.
    Two reductions (the max; then exp-sum, target logit and logit sum packed in one), none in backward. The caller's
    logits are not written to; no second [N, V_local] tensor is kept for backward.
    """
    return _CrossEntropy.apply(logits, targets, axis, tuple(ranges), ignore_index, label_smoothing, z_loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, axis, ranges, ignore_index, label_smoothing, z_loss):
        start, stop = ranges[axis.rank]
        vocab_size = ranges[-1][1]
        inside = (targets == ignore_index) | ((targets >= 0) & (targets < vocab_size))
        torch._assert_async(inside.all(), "a target is outside the vocabulary")
        wide = at_least_float32(logits)
        peak = all_reduce(wide.amax(-1), axis, "max")
        shifted = wide - peak.unsqueeze(-1)
        valid = targets != ignore_index
        local = targets - start
        mine = valid & (local >= 0) & (local < stop - start)
        local = local.clamp(0, stop - start - 1).unsqueeze(-1)
        target_logit = shifted.gather(-1, local).squeeze(-1).masked_fill(~mine, 0)
        # The sum of logits is asked for only with smoothing: a -inf logit (a banned token) must not make 0 * inf.
        smoothed = [shifted.sum(-1)] if label_smoothing else []
        sums = all_reduce(torch.stack([shifted.exp_().sum(-1), target_logit, *smoothed]), axis)
        log_sum = sums[0].log()
        loss = log_sum - (1 - label_smoothing) * sums[1]
        if label_smoothing:
            loss = loss - label_smoothing / vocab_size * sums[2]
        log_z = log_sum + peak
        if z_loss:
            loss = loss + z_loss * log_z.square()
        ctx.save_for_backward(logits, log_z, local, mine, valid)
        ctx.settings = label_smoothing, z_loss, vocab_size
        return loss.masked_fill(~valid, 0)

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative("vocab_parallel_cross_entropy")
        logits, log_z, local, mine, valid = ctx.saved_tensors
        label_smoothing, z_loss, vocab_size = ctx.settings
        wide = at_least_float32(logits)
        d = (wide - log_z.unsqueeze(-1)).exp_()
        if z_loss:
            d *= (1 + 2 * z_loss * log_z).unsqueeze(-1)
        if label_smoothing:
            d -= label_smoothing / vocab_size
        d.scatter_add_(-1, local, mine.to(d.dtype).mul(label_smoothing - 1).unsqueeze(-1))
        d *= grad.to(d.dtype).masked_fill(~valid, 0).unsqueeze(-1)
        return d.masked_fill_(~valid.unsqueeze(-1), 0).to(logits.dtype), None, None, None, None, None, None
