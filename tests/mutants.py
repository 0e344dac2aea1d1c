"""Deliberate mistakes, each one line of a real codebase: the tests must see them.

A mutant is applied while the sharded module runs, forward and backward.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch

from parallel_attn import collectives, sharding
from parallel_attn.attention import grouped
from parallel_attn.nn import linear, norm


def _identity(x, *_):
    return x


def _kv_copies_not_summed():
    def shared_weights(layer):
        return layer.weight, layer.bias

    return mock.patch.object(linear.ColumnParallelLinear, "shared_weights", shared_weights)


def _input_gradient_not_summed():
    return mock.patch.object(linear, "start_all_reduce", _identity)


def _input_gradient_summed_twice():
    return mock.patch.object(
        linear, "finish", lambda x, axis: collectives.all_reduce(collectives.finish(x, axis), axis)
    )


def _output_not_summed():
    return mock.patch.object(linear, "reduce", _identity)


def _output_bias_on_every_rank():
    def forward(layer, x):
        y = torch.nn.functional.linear(x, layer.weight, layer.bias)
        return collectives.reduce(y, layer.tensor_axis)

    return mock.patch.object(linear.RowParallelLinear, "forward", forward)


def _statistic_gradient_not_summed():
    """The full-width norm's sum of squares without its copy: its gradient covers this rank's heads only."""

    def copy(x, axis):
        return x if x.dim() == 2 else collectives.copy(x, axis)

    return mock.patch.object(grouped, "copy", copy)


def _statistic_counts_every_copy():
    return mock.patch.object(sharding.HeadPlan, "owns_kv", lambda plan, rank: True)


def _full_norm_gain_not_summed():
    return mock.patch.object(norm, "copy", _identity)


def _head_norm_gain_not_summed():
    return mock.patch.object(norm, "copy", _identity)


_MUTANTS = {
    "kv_copies_not_summed": _kv_copies_not_summed,
    "input_gradient_not_summed": _input_gradient_not_summed,
    "input_gradient_summed_twice": _input_gradient_summed_twice,
    "output_not_summed": _output_not_summed,
    "output_bias_on_every_rank": _output_bias_on_every_rank,
    "statistic_gradient_not_summed": _statistic_gradient_not_summed,
    "statistic_counts_every_copy": _statistic_counts_every_copy,
    "full_norm_gain_not_summed": _full_norm_gain_not_summed,
    "head_norm_gain_not_summed": _head_norm_gain_not_summed,
}
ATTENTION = list(_MUTANTS)


@contextmanager
def applied(name: str | None):
    if name is None:
        yield
        return
    with _MUTANTS[name]():
        yield
