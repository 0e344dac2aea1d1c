"""Column- and row-parallel linear layers (Shoeybi 2019, section 3).

Shapes: B batch, S sequence, D input width, F output width; `_local` is what this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_attn.collectives import copy, finish, reduce, start_all_reduce
from parallel_attn.initialization import Initializer, constant, fan_in_normal
from parallel_attn.mesh import AxisGroup
from parallel_attn.nn.module import Placement, ShardedModule
from parallel_attn.sharding import Range, scale_ranges


class ColumnParallelLinear(ShardedModule):
    """y_local = x W_local^T + b_local: the rows of W (D -> F) are split over the tensor axis by `ranges`.

    Equal ranges on several ranks are copies (a KV head held by a run of ranks): each copy sees only the gradient of its
    own rank's queries, so weight and bias pass through one `copy` over exactly those ranks.
    """

    multiplies_input = True

    def __init__(
        self,
        placement: Placement,
        in_features: int,
        out_features: int,
        ranges: tuple[Range, ...],
        *,
        bias: bool = False,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__(placement)
        self.in_features, self.out_features = in_features, out_features
        self.new_parameter(
            "weight", (out_features, in_features), initializer or fan_in_normal(), dim=0, ranges=ranges, decay=True
        )
        if bias:
            self.new_parameter("bias", (out_features,), constant(0.0), dim=0, ranges=ranges)
        else:
            self.register_parameter("bias", None)
        self.copies = self.tensor_axis.subgroup(self.shards["weight"].holders)

    def shared_weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight (F_local, D) and bias (F_local,), whose gradients are summed over the ranks that hold copies."""
        bias = None if self.bias is None else copy(self.bias, self.copies)
        return copy(self.weight, self.copies), bias

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D), replicated -> (..., F_local)."""
        return column_parallel(x, [self])[0]


def column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear], *, summed: bool = True) -> tuple[Tensor, ...]:
    """Several column-parallel linears on one replicated input x (..., D), with one all-reduce in backward.

    The gradient of x is summed locally over the layers, its all-reduce is started, and the weight gradients are computed
    while it travels. The compute dtype is that of x, or autocast's: weights are cast to it (fp32 masters under bf16 compute).
    summed=False: whatever made x owes its gradient the sum over the axis (a `copy`, an `all_gather`): none is made here.
    """
    kind = x.device.type  # (the meta device has no autocast to ask for)
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    if not torch.is_grad_enabled():
        return tuple([_linear(x, layer.weight, layer.bias) for layer in layers])
    weights, biases = zip(*(layer.shared_weights() for layer in layers))
    axis = layers[0].tensor_axis if summed else AxisGroup()
    return _ColumnParallel.apply(x, axis, len(layers), *weights, *biases)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in the dtype of x."""
    dtype = x.dtype
    if weight.dtype is not dtype:
        weight = weight.to(dtype)
    if bias is not None and bias.dtype is not dtype:
        bias = bias.to(dtype)
    return F.linear(x, weight, bias)


class _ColumnParallel(torch.autograd.Function):
    """y_i = x W_i^T + b_i for all i; dx = all-reduce(sum_i dy_i W_i), dW_i = dy_i^T x, db_i = sum dy_i."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: AxisGroup, count: int, *parameters: Tensor | None):
        weights, biases = parameters[:count], parameters[count:]
        ctx.axis = axis
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        # Weights are saved as they are stored, not as they were cast: no second copy lives until backward.
        ctx.save_for_backward(x, *weights)
        return tuple(_linear(x, weight, bias) for weight, bias in zip(weights, biases))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        grads = [grad.contiguous() for grad in grads]  # out.sum() hands over stride 0, which GEMMs take slowly
        needs = ctx.needs_input_grad
        twice = torch.is_grad_enabled()  # create_graph=True: collectives that have a derivative, none of them early
        if twice:
            x = copy(x, ctx.axis)
        dx = None
        if needs[0]:
            for grad, weight in zip(grads, weights):
                part = grad @ weight.to(grad.dtype)
                dx = part if dx is None else dx.add_(part)
            dx = reduce(dx, ctx.axis) if twice else start_all_reduce(dx, ctx.axis)
        flat_x = x.reshape(-1, x.shape[-1])
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        count = len(weights)
        dweights = [
            (grad.t() @ flat_x).to(weight.dtype) if needs[3 + i] else None
            for i, (grad, weight) in enumerate(zip(flat, weights))
        ]
        dbiases = [
            grad.sum(0).to(dtype) if dtype is not None and needs[3 + count + i] else None
            for i, (grad, dtype) in enumerate(zip(flat, ctx.bias_dtypes))
        ]
        if dx is not None and not twice:
            dx = finish(dx, ctx.axis)
        return dx, None, None, *dweights, *dbiases


class RowParallelLinear(ShardedModule):
    """y = reduce(x_local W_local^T) + b: the columns of W (D -> F) are split over the tensor axis by `ranges`.

    The bias is added once, after the sum.
    """

    multiplies_input = True

    def __init__(
        self,
        placement: Placement,
        in_features: int,
        out_features: int,
        ranges: tuple[Range, ...],
        *,
        bias: bool = False,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__(placement)
        self.in_features, self.out_features = in_features, out_features
        self.new_parameter(
            "weight", (out_features, in_features), initializer or fan_in_normal(), dim=1, ranges=ranges, decay=True
        )
        if bias:
            self.new_parameter("bias", (out_features,), constant(0.0))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D_local) -> (..., F), replicated."""
        y, bias = reduce(_linear(x, self.weight, None), self.tensor_axis), self.bias
        return y if bias is None else y + bias.to(y.dtype)


class ReplicatedLinear(ShardedModule):
    """y = x W^T + b with the whole weight (D -> F) on every rank: replicated in, replicated out, no collective."""

    multiplies_input = True

    def __init__(
        self,
        placement: Placement,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__(placement)
        self.in_features, self.out_features = in_features, out_features
        self.new_parameter("weight", (out_features, in_features), initializer or fan_in_normal(), decay=True)
        if bias:
            self.new_parameter("bias", (out_features,), constant(0.0))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D), replicated -> (..., F), replicated."""
        return _linear(x, self.weight, self.bias)


class HeadLinear(ColumnParallelLinear):
    """One input per group of heads (grouped latent attention): x (..., K_local, C) -> (..., H_local, F).

    The full weight is (H F, C); heads of group k read x[..., k, :]. x is rank-local: its gradient owes no sum.
    """

    def __init__(self, placement: Placement, in_features: int, head_features: int, heads: int, ranges) -> None:
        super().__init__(placement, in_features, heads * head_features, scale_ranges(ranges, head_features))
        self.head_features = head_features

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K_local, C) -> (..., H_local, F)."""
        groups = x.shape[-2]
        weight = self.shared_weights()[0].to(x.dtype).unflatten(0, (groups, -1))
        return torch.einsum("...kc,kfc->...kf", x, weight).unflatten(-1, (-1, self.head_features)).flatten(-3, -2)
