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

import difflib
import functools
import importlib
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from parallel_attn.collectives import all_reduce, reduce
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup


@dataclass(frozen=True)
class Mutant:
    """`wrong(original, *args)` in place of `original(*args)`, wherever `touches(*args)`."""

    name: str
    bug: str
    module: str
    attribute: str
    wrong: Callable
    touches: Callable[..., bool] | None = None

    def is_hit(self, *args: Any, **kwargs: Any) -> bool:
        if any(isinstance(value, AxisGroup) and value.degree == 1 for value in (*args, *kwargs.values())):
            return False
        return self.touches is None or self.touches(*args, **kwargs)


_MUTANTS: dict[str, Mutant] = {}


def mutant(module: str, attribute: str, *, touches: Callable[..., bool] | None = None) -> Callable:
    """Registers the decorated function as a mutant under its own name; its docstring says what it copies."""

    def register(wrong: Callable) -> Callable:
        bug = " ".join(wrong.__doc__.split())
        _MUTANTS[wrong.__name__] = Mutant(wrong.__name__, bug, module, attribute, wrong, touches)
        return wrong

    return register


def find(name: str) -> Mutant:
    """Raises SettingsError for an unknown name, with the nearest one."""
    if name not in _MUTANTS:
        near = difflib.get_close_matches(name, _MUTANTS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise SettingsError(f"--mutate {name}: no such mutant; {hint}`--mutate list` names them")
    return _MUTANTS[name]


def listing() -> str:
    """All mutants by name, each with the bug that it copies, for a terminal."""
    lines = []
    for each in _MUTANTS.values():
        lines += [each.name, *textwrap.wrap(each.bug, 108, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(lines)


class Patches:
    """Context that puts mutants in place, or only counts where they would act (`watch`); may be entered again.

    hits: name -> calls so far that the mutant got wrong, on this rank.
    """

    def __init__(self, mutants: Iterable[Mutant], *, watch: bool = False) -> None:
        self.mutants, self.watch = list(mutants), watch
        self.hits = {mutant.name: 0 for mutant in self.mutants}
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Patches:  # noqa: PYI034 - Self needs Python 3.11
        for each in self.mutants:
            owner = importlib.import_module(each.module)
            *path, leaf = each.attribute.split(".")
            for name in path:
                owner = getattr(owner, name)
            original = vars(owner)[leaf]
            if isinstance(original, property):
                standin: Any = property(self._standin(each, original.fget))
            else:
                standin = self._standin(each, original)
            self._undo.append((owner, leaf, original))
            setattr(owner, leaf, standin)
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            setattr(*self._undo.pop())

    def _standin(self, each: Mutant, original: Callable) -> Callable:
        @functools.wraps(original)
        def standin(*args: Any, **kwargs: Any) -> Any:
            if not each.is_hit(*args, **kwargs):
                return original(*args, **kwargs)
            self.hits[each.name] += 1
            return original(*args, **kwargs) if self.watch else each.wrong(original, *args, **kwargs)

        return standin

    def total_hits(self, axis: AxisGroup) -> dict[str, int]:
        """Hits of all ranks together."""
        counts = torch.tensor(list(self.hits.values()))
        if axis.degree > 1:
            dist.all_reduce(counts, group=axis.group)
        return dict(zip(self.hits, counts.tolist()))


def applied(name: str | None) -> Patches:
    """The mutant called `name`; None: nothing."""
    return Patches([] if name is None else [find(name)])


def watched() -> Patches:
    """All mutants, none of them in force: after a pass, `hits` says which of them this code can meet."""
    return Patches(_MUTANTS.values(), watch=True)


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


# ---- norms of queries and keys -------------------------------------------------------------------------------------


@mutant("parallel_attn.nn.norm", "copy")
def head_norm_gain_not_summed(original, x, axis):
    """The gain of a norm per head, replicated, sees on each rank only the gradient of that rank's heads."""
    return x


@mutant("parallel_attn.nn.norm", "copy")
def head_norm_gain_summed_at_every_pass(original, x, axis):
    """A hook sums the accumulated gradient of the gain: right for one pass, wrong from the second micro batch on."""

    def hook(parameter):
        parameter.grad.copy_(all_reduce(parameter.grad, axis))

    if not x._post_accumulate_grad_hooks:
        x.register_post_accumulate_grad_hook(hook)
    return x


@mutant("parallel_attn.attention.grouped", "copy", touches=lambda x, axis: x.dim() == 3)
def statistic_gradient_not_summed(original, x, axis):
    """The full-width norm's sum of squares without its copy: its gradient covers this rank's heads only."""
    return x


@mutant(
    "parallel_attn.sharding",
    "HeadPlan.owns_kv",
    touches=lambda plan, rank: plan.holders(rank)[0] != rank,
)
def statistic_counts_every_copy(original, plan, rank):
    """A KV head on several ranks enters the full-width key norm's sum of squares once per rank."""
    return True


@mutant("parallel_attn.attention.grouped", "copy", touches=lambda x, axis: x.dim() == 1)
def full_norm_gain_not_summed(original, x, axis):
    """The full-width key norm's gain of a KV head on several ranks, without the sum over its holders."""
    return x


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
