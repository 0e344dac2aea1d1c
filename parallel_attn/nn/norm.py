"""RMSNorm (Zhang & Sennrich 2019, eq. 4), computed in float32 or the input's precision if that is higher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_attn.collectives import copy
from parallel_attn.initialization import constant
from parallel_attn.nn.module import Placement, ShardedModule
from parallel_attn.sharding import scale_ranges


def refuse_second_derivative(what: str) -> None:
    """Raises RuntimeError in a backward with create_graph=True: better than a second derivative that is silently wrong."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{what} has no second derivative: create_graph=True is not supported")


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class RMSNorm(ShardedModule):
    """y = x / sqrt(mean(x^2) + eps) * gain over the last dim (width D), or * (1 + gain) when `zero_centered`.

    `rank_local=True` says that what is made of y differs between tensor ranks (x is this rank's heads, or a gathered latent
    that it expands for its own heads): then the replicated gain sees only a part of its gradient on each rank and passes
    through one `copy`.
    """

    def __init__(
        self,
        placement: Placement,
        width: int,
        *,
        eps: float = 1e-6,
        zero_centered: bool = False,
        rank_local: bool = False,
    ) -> None:
        super().__init__(placement)
        self.width, self.eps, self.zero_centered, self.rank_local = width, eps, zero_centered, rank_local
        self.new_parameter("weight", (width,), constant(0.0 if zero_centered else 1.0))

    def gain(self, dtype: torch.dtype) -> Tensor:
        """The multiplier (D,) in `dtype`."""
        weight = copy(self.weight, self.tensor_axis) if self.rank_local else self.weight
        weight = weight if weight.dtype is dtype else weight.to(dtype)
        return weight + 1 if self.zero_centered else weight

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D), in the dtype of x."""
        wide = at_least_float32(x)
        normed = rms_norm(wide, self.gain(wide.dtype), self.eps)
        return normed if normed.dtype is x.dtype else normed.to(x.dtype)


class HeadGain(ShardedModule):
    """A gain (heads * E,) cut with its heads, for a norm over all heads together or one with a gain for each head.

    The gain of a head that several ranks hold passes through a `copy` over them.
    """

    def __init__(self, placement: Placement, width: int, heads: int, ranges, *, zero_centered: bool = False) -> None:
        super().__init__(placement)
        self.width, self.full_width, self.zero_centered = width, heads * width, zero_centered
        rows = scale_ranges(ranges, width)
        self.new_parameter("weight", (heads * width,), constant(0.0 if zero_centered else 1.0), dim=0, ranges=rows)
        self.copies = self.tensor_axis.subgroup(self.shards["weight"].holders)

    def forward(self, dtype: torch.dtype) -> Tensor:
        """The multiplier of this rank's heads (heads_local, E) in `dtype`."""
        gain = copy(self.weight, self.copies).to(dtype).unflatten(0, (-1, self.width))
        return gain + 1 if self.zero_centered else gain


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dim: x (..., D), gain (D,), one dtype. Keeps x for backward."""
    # torch has a fused kernel on CUDA; on CPU its composite took 2.2 to 2.5 times as long (2,048 x 128, both passes).
    # Without a gradient the composite has less of an overhead, which is what counts for a token of generation.
    if x.is_cuda or not torch.is_grad_enabled():
        return F.rms_norm(x, gain.shape, gain, eps)
    return _RMSNorm.apply(x, gain, eps)


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps), n = x r: dx = r (g gain - n mean(g gain n)), dgain = sum(g n)."""

    @staticmethod
    def forward(ctx, x, gain, eps):
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, inverse)
        return (x * inverse).mul_(gain)

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative("rms_norm")
        x, gain, inverse = ctx.saved_tensors
        normed = x * inverse
        product = grad * normed
        dgain = product.reshape(-1, product.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dgain, None
        mean = (product @ gain).div_(x.shape[-1]).unsqueeze(-1)
        return (grad * gain).sub_(normed.mul_(mean)).mul_(inverse), dgain, None
