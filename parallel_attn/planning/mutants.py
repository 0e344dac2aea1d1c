"""Deliberate mistakes, each one line of a real codebase: a certificate that cannot turn red proves nothing.

A mutant is a function that stands in for another one, found by (module, name), while the sharded module is built and run.
To add one:

    @mutant("parallel_attn.nn.linear", "reduce")
    def output_not_summed(original, x, axis):
        \"\"\"One line: the bug of the real world that it copies.\"\"\"
        return x

It is not asked for calls over an axis of one rank, where there is nothing to get wrong, nor for calls of which
`touches(*args)` is false; all others count as hits. `name` may be a method or a property of a class: "Class.method".
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from parallel_attn.collectives import all_gather, all_reduce, copy, reduce
from parallel_attn.planning.mutation import Patches, applied, find, listing, mutant, watched
from parallel_attn.sharding import scale_ranges

__all__ = ["Patches", "applied", "find", "listing", "watched"]

# ---- linear layers -------------------------------------------------------------------------------------------------


@mutant("parallel_attn.nn.linear", "start_all_reduce")
def input_gradient_not_summed(original, x, axis):
    """Backward of the column-parallel linears without its all-reduce: each rank keeps the part of its own heads."""
    return x


@mutant("parallel_attn.nn.linear", "finish")
def input_gradient_summed_twice(original, x, axis):
    """A hook of the training loop sums the input gradient again, after the layer has done so."""
    return all_reduce(original(x, axis), axis)


@mutant("parallel_attn.nn.linear", "reduce")
def output_not_summed(original, x, axis):
    """The row-parallel linear without its all-reduce: each rank goes on with its own part of the output."""
    return x


@mutant(
    "parallel_attn.nn.linear",
    "RowParallelLinear.forward",
    touches=lambda layer, x: layer.bias is not None and layer.tensor_axis.degree > 1,
)
def output_bias_on_every_rank(original, layer, x):
    """The output bias goes into the local product, so the sum over ranks counts it once per rank."""
    y = F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))
    return reduce(y, layer.tensor_axis)


@mutant(
    "parallel_attn.nn.linear",
    "ColumnParallelLinear.shared_weights",
    touches=lambda layer: layer.copies.degree > 1,
)
def kv_copies_not_summed(original, layer):
    """A KV head held by several ranks takes on each only the gradient of that rank's queries."""
    return layer.weight, layer.bias


# ---- norms -----------------------------------------------------------------------------------------------------------


def _rank_local(norm, dtype) -> bool:
    return norm.rank_local and norm.tensor_axis.degree > 1


def _gain(norm, weight, dtype):
    return weight.to(dtype) + 1 if norm.zero_centered else weight.to(dtype)


@mutant("parallel_attn.nn.norm", "RMSNorm.gain", touches=_rank_local)
def norm_gain_not_summed(original, norm, dtype):
    """The replicated gain of a norm on sharded heads or on gathered latents sees only the gradient of its rank's heads."""
    return _gain(norm, norm.weight, dtype)


@mutant("parallel_attn.nn.norm", "RMSNorm.gain", touches=_rank_local)
def norm_gain_summed_at_every_pass(original, norm, dtype):
    """A hook sums the accumulated gradient of a gain: right for one pass, wrong from the second micro batch on."""

    def hook(parameter):
        parameter.grad.copy_(all_reduce(parameter.grad, norm.tensor_axis))

    if not norm.weight._post_accumulate_grad_hooks:
        norm.weight.register_post_accumulate_grad_hook(hook)
    return _gain(norm, norm.weight, dtype)


@mutant("parallel_attn.nn.norm", "HeadGain.forward", touches=lambda gain, dtype: gain.copies.degree > 1)
def head_gain_not_summed(original, gain, dtype):
    """The gain of a KV or latent head that several ranks hold (full-width key norm, grouped latents), without their sum."""
    return _gain(gain, gain.weight, dtype).unflatten(0, (-1, gain.width))


@mutant("parallel_attn.attention.grouped", "copy")
def statistic_gradient_not_summed(original, x, axis):
    """The full-width norm's sum of squares without its copy: its gradient covers this rank's heads only."""
    return x


@mutant("parallel_attn.sharding", "HeadPlan.owns_kv", touches=lambda plan, rank: plan.holders(rank)[0] != rank)
def statistic_counts_every_copy(original, plan, rank):
    """A KV head on several ranks enters the full-width key norm's sum of squares once per rank."""
    return True


# ---- latents and their rope key ------------------------------------------------------------------------------------


def _with_rope_key(layer, latents) -> bool:
    """Multi-head latent attention, whose rope key comes last."""
    return layer.tensor_axis.degree > 1 and layer.rope_dim > 0 and not hasattr(layer.config, "num_latent_heads")


class _OwnPart(torch.autograd.Function):
    """Identity whose gradient keeps `part` only: of a sum over ranks, what this rank itself had to give."""

    @staticmethod
    def forward(ctx, x, part):
        ctx.save_for_backward(part)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def _own_features(layer, x, shard, first):
    """1 for the features of x that this rank's slice of a down projection makes; x begins at its feature `first`."""
    start, stop = shard.ranges[shard.rank]
    feature = torch.arange(first, first + x.shape[-1], device=x.device)
    return ((feature >= start) & (feature < stop)).to(x.dtype)


@mutant("parallel_attn.attention.latent", "LatentAttention.head_local", touches=_with_rope_key)
def rope_key_gradient_not_summed(original, layer, latents):
    """The shared rope key without the sum that the latents get: the forward is exact, its rows of the gradient are not."""
    if layer.sharded:
        own = _own_features(layer, latents[-1], layer.kv_a.shards["weight"], layer.latent_dim)
        return original(layer, [*latents[:-1], _OwnPart.apply(latents[-1], own)])
    return [*original(layer, latents[:-1]), latents[-1]]


@mutant("parallel_attn.attention.latent", "LatentAttention.head_local", touches=_with_rope_key)
def rope_key_gradient_summed_twice(original, layer, latents):
    """The shared rope key gets a copy of its own beside the sum that it has already."""
    return [*(whole := original(layer, latents))[:-1], copy(whole[-1], layer.tensor_axis)]


@mutant(
    "parallel_attn.attention.latent",
    "LatentAttention.head_local",
    touches=lambda layer, latents: layer.tensor_axis.degree > 1 and len(latents) > 0,
)
def latent_gradient_not_summed(original, layer, latents):
    """A latent that each rank expands for its own heads, without the sum of what comes back from them."""
    if not layer.sharded:
        return [latents[0], *original(layer, latents[1:])]
    shard = (layer.q_a if hasattr(layer.config, "num_latent_heads") else layer.kv_a).shards["weight"]
    return original(layer, [_OwnPart.apply(latents[0], _own_features(layer, latents[0], shard, 0)), *latents[1:]])


# ---- gate, dropout -------------------------------------------------------------------------------------------------


@mutant(
    ("parallel_attn.attention.grouped", "parallel_attn.attention.latent", "parallel_attn.attention.tied",
     "parallel_attn.attention.cross"),
    "column_parallel",
    touches=lambda x, layers, **_: layers[-1].placement.name.endswith("gate") and layers[-1].tensor_axis.degree > 1,
)  # fmt: skip
def gate_reads_input_past_its_copy(original, x, layers, **settings):
    """The gate projects x beside the other projections: its part of the input gradient is not summed."""
    others = original(x, layers[:-1], **settings) if layers[:-1] else ()
    return *others, *original(x, layers[-1:], summed=False)


@mutant(
    "parallel_attn.attention.base",
    "Attention.output",
    touches=lambda layer, heads, gate: gate is not None and layer.plan.num_kv_heads < layer.tensor_axis.degree,
)
def gate_cut_by_kv_group(original, layer, heads, gate):
    """With fewer KV heads than ranks, gate rows are cut by KV head: every rank of a run takes the first one's rows."""
    width = gate.shape[-1] // heads.shape[2]
    plan, axis = layer.plan, layer.tensor_axis
    whole = all_gather(gate, axis, -1, scale_ranges(plan.query_heads, width))
    start = plan.kv_heads[axis.rank][0] * plan.group_size * width
    return original(layer, heads, whole[..., start : start + gate.shape[-1]])


@mutant(
    "parallel_attn.attention.base",
    "Dropout",
    touches=lambda rate, seed, layer, step, samples, heads: heads[0] > 0,
)
def dropout_masks_by_local_head(original, rate, seed, layer, step, samples, heads):
    """Dropout masks numbered by local head: the heads of every rank get the masks of the first rank's."""
    return original(rate, seed, layer, step, samples, (0, heads[1] - heads[0]))


# ---- vocabulary, gradient norm, initial weights --------------------------------------------------------------------


@mutant("parallel_attn.nn.vocabulary", "reduce")
def embedding_not_summed(original, x, axis):
    """Tokens of another rank's rows stay zero vectors."""
    return x


@mutant("parallel_attn.nn.cross_entropy", "all_reduce", touches=lambda x, axis, op="sum": op == "sum")
def cross_entropy_over_own_vocabulary(original, x, axis, op="sum"):
    """Softmax over this rank's part of the vocabulary alone."""
    return x


@mutant("parallel_attn.sharding", "ParameterShard.first_holder", touches=lambda shard: len(shard.holders) > 1)
def gradient_norm_counts_every_copy(original, shard):
    """The gradient norm counts a replicated parameter once per rank, and clips too hard."""
    return True


@mutant("parallel_attn.nn.module", "draw_full", touches=lambda *_: dist.is_initialized() and dist.get_rank() > 0)
def initial_weights_drawn_per_rank(original, full_shape, seed, name, initializer):
    """Each rank seeds its own generator: the model that starts is another one at every degree."""
    return original(full_shape, seed + dist.get_rank(), name, initializer)
