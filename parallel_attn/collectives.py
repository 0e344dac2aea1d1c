"""Differentiable collectives over an axis, in pairs of forward and backward.

    function          forward                              backward
    copy              identity                             all-reduce           Megatron's f (Shoeybi 2019, fig. 3)
    reduce            all-reduce                           identity             Megatron's g
    gather            all-gather along a dim               this rank's slice    the gathered value is used alike everywhere
    scatter           this rank's slice                    all-gather
    all_gather        all-gather along a dim               reduce-scatter       each rank uses the gathered value its own way
    reduce_scatter    reduce-scatter along a dim           all-gather

Slices may have uneven sizes: `ranges` gives every rank's (start, stop) along the dim. Inputs of any stride, stride-0 and
empty ones are taken; a caller's tensor is never written to; bf16 travels as bf16. Over one rank all of them are no-ops.
Built on torch's functional collectives, as bare ops (their Python wrappers cost more than a small collective): started
early, waited for late, traceable by torch.compile. Each backward is the mirror pair's function, so that a second
derivative (create_graph=True) is right too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives  # registers the ops below
from torch import Tensor

from parallel_attn.mesh import AxisGroup
from parallel_attn.sharding import Range

_ops = torch.ops._c10d_functional

# ---- plain collectives, without a gradient -------------------------------------------------------------------------


def start_all_reduce(x: Tensor, axis: AxisGroup, op: str = "sum") -> Tensor:
    """Starts an all-reduce of `x` and returns at once; the result may be read after `finish`."""
    if axis.degree == 1 or x.numel() == 0:
        return x
    # gloo reads strided memory as if it were dense: silently wrong without .contiguous()
    return _ops.all_reduce(x.contiguous(), op, axis.group.group_name)


def finish(x: Tensor, axis: AxisGroup) -> Tensor:
    """Waits for what `start_all_reduce` began."""
    return x if axis.degree == 1 or x.numel() == 0 else _ops.wait_tensor(x)


def all_reduce(x: Tensor, axis: AxisGroup, op: str = "sum") -> Tensor:
    """Sum (or "max", "min", ...) over the axis, as a new tensor; `x` itself over one rank."""
    return finish(start_all_reduce(x, axis, op), axis)


def all_gather_slices(x: Tensor, axis: AxisGroup, dim: int, ranges: Sequence[Range]) -> Tensor:
    """Concatenates every rank's slice along `dim`. Uneven slices are padded inside (gloo refuses them)."""
    if axis.degree == 1:
        return x
    dim = dim % x.dim()
    longest = max(stop - start for start, stop in ranges)
    moved = x.transpose(0, dim)
    short = longest - moved.shape[0]
    if short:
        moved = torch.cat([moved, moved.new_zeros(short, *moved.shape[1:])])
    if moved.numel() == 0:
        return x.new_zeros(*x.shape[:dim], ranges[-1][1], *x.shape[dim + 1 :])
    flat = _ops.wait_tensor(_ops.all_gather_into_tensor(moved.contiguous(), axis.degree, axis.group.group_name))
    if any(stop - start != longest for start, stop in ranges):
        pieces = flat.split(longest)
        flat = torch.cat([piece[: stop - start] for piece, (start, stop) in zip(pieces, ranges)])
    return flat.transpose(0, dim).contiguous()


def reduce_scatter_slices(x: Tensor, axis: AxisGroup, dim: int, ranges: Sequence[Range]) -> Tensor:
    """Sums `x` over the axis and keeps this rank's slice along `dim`. Uneven slices are padded inside."""
    if axis.degree == 1:
        return x
    dim = dim % x.dim()
    start, stop = ranges[axis.rank]
    longest = max(stop - start for start, stop in ranges)
    moved = x.transpose(0, dim)
    if any(stop - start != longest for start, stop in ranges):
        padded = moved.new_zeros(axis.degree, longest, *moved.shape[1:])
        for rank, (first, last) in enumerate(ranges):
            padded[rank, : last - first] = moved[first:last]
        moved = padded.flatten(0, 1)
    if moved.numel() == 0:
        return x.new_zeros(*x.shape[:dim], stop - start, *x.shape[dim + 1 :])
    mine = _ops.reduce_scatter_tensor(moved.contiguous(), "sum", axis.degree, axis.group.group_name)
    mine = _ops.wait_tensor(mine)
    return mine[: stop - start].transpose(0, dim).contiguous()


def own_slice(x: Tensor, axis: AxisGroup, dim: int, ranges: Sequence[Range]) -> Tensor:
    if axis.degree == 1:
        return x
    start, stop = ranges[axis.rank]
    return x.narrow(dim, start, stop - start).contiguous()


# ---- the differentiable pairs --------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return copy(grad, ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dim, ranges):
        ctx.where = axis, dim, ranges
        return all_gather_slices(x, axis, dim, ranges)

    @staticmethod
    def backward(ctx, grad):
        return scatter(grad, *ctx.where), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dim, ranges):
        ctx.where = axis, dim, ranges
        return own_slice(x, axis, dim, ranges)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, *ctx.where), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dim, ranges):
        ctx.where = axis, dim, ranges
        return all_gather_slices(x, axis, dim, ranges)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, *ctx.where), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dim, ranges):
        ctx.where = axis, dim, ranges
        return reduce_scatter_slices(x, axis, dim, ranges)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, *ctx.where), None, None, None


def copy(x: Tensor, axis: AxisGroup) -> Tensor:
    """Identity forward, sum over the axis backward: stands once where a replicated value becomes rank-local work."""
    return x if axis.degree == 1 else _Copy.apply(x, axis)


def reduce(x: Tensor, axis: AxisGroup) -> Tensor:
    """Sum over the axis forward, identity backward: a partial value becomes a replicated one."""
    return x if axis.degree == 1 else _Reduce.apply(x, axis)


def gather(x: Tensor, axis: AxisGroup, dim: int, ranges: Sequence[Range]) -> Tensor:
    """All slices along `dim`, for a use that is the same on every rank (its gradient is replicated)."""
    return x if axis.degree == 1 else _Gather.apply(x, axis, dim, tuple(ranges))


def scatter(x: Tensor, axis: AxisGroup, dim: int, ranges: Sequence[Range]) -> Tensor:
    """This rank's slice of a replicated value along `dim`."""
    return x if axis.degree == 1 else _Scatter.apply(x, axis, dim, tuple(ranges))


def all_gather(x: Tensor, axis: AxisGroup, dim: int, ranges: Sequence[Range]) -> Tensor:
    """All slices along `dim`, for a use that differs between ranks (its gradient is partial and owed a sum)."""
    return x if axis.degree == 1 else _AllGather.apply(x, axis, dim, tuple(ranges))


def reduce_scatter(x: Tensor, axis: AxisGroup, dim: int, ranges: Sequence[Range]) -> Tensor:
    """This rank's slice along `dim` of the sum over the axis."""
    return x if axis.degree == 1 else _ReduceScatter.apply(x, axis, dim, tuple(ranges))


def all_gather_packed(
    slices: Sequence[Tensor], axis: AxisGroup, ranges_of_each: Sequence[Sequence[Range]]
) -> list[Tensor]:
    """`all_gather` of several tensors (..., F_local) along their last dim, in one collective forward and one backward.

    ranges_of_each: for each tensor every rank's (start, stop) along that dim.
    """
    if axis.degree == 1 or not slices:
        return list(slices)
    widths = [[stop - start for start, stop in (ranges[rank] for ranges in ranges_of_each)] for rank in range(axis.degree)]
    packed, start = [], 0
    for local in widths:
        packed.append((start, start + sum(local)))
        start += sum(local)
    whole = all_gather(torch.cat(list(slices), dim=-1), axis, -1, packed)
    pieces = whole.split([width for local in widths for width in local], dim=-1)
    return [torch.cat(pieces[i :: len(slices)], dim=-1) for i in range(len(slices))]
