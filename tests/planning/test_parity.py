"""The comparison itself: axes of any kind, several inputs, tokens, and errors that must not be lost."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel_attn import AxisGroup
from parallel_attn.nn import ColumnParallelLinear, Placement, RowParallelLinear, ShardedModule, VocabParallelEmbedding
from parallel_attn.planning import compare
from parallel_attn.planning.parity import BOUNDS, COPIES, GRADIENTS, INPUT_GRADIENT, Parity, bounds_of, relative_error
from parallel_attn.sharding import split_evenly
from tests.world import run


class Mixed(ShardedModule):
    """Two floating inputs of different widths, tokens and a mask."""

    def __init__(self, axis: AxisGroup) -> None:
        place = Placement(axis, "mixed", 0, None, torch.float64)
        super().__init__(place)
        ranges = split_evenly(7, axis.degree)
        self.embedding = VocabParallelEmbedding(place.child("embedding"), 11, 6)
        self.left = ColumnParallelLinear(place.child("left"), 6, 7, ranges, bias=True)
        self.right = ColumnParallelLinear(place.child("right"), 4, 7, ranges)
        self.out = RowParallelLinear(place.child("out"), 7, 5, ranges)

    def forward(self, x, y, tokens, mask):
        hidden = self.left(x + self.embedding(tokens)) * self.right(y)
        return self.out(hidden.masked_fill(~mask.unsqueeze(-1), 0))


def mixed_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, width, generator=generator, dtype=torch.float64) for width in (6, 4))
    return [x, y, torch.tensor([[0, 10, 3], [5, 6, 0]]), torch.tensor([[True, True, False], [True, True, True]])]


def on_axes_case() -> list[Parity]:
    """Over a dim of a mesh whose other dim is another replica, over its group, over the axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found = []
    for where in (mesh, mesh["tensor"], mesh["tensor"].get_group(), AxisGroup.of(mesh)):
        found.append(compare(where, Mixed, lambda module, inputs: module(*inputs), mixed_inputs()))
    return found


def test_axes_of_any_kind_and_inputs_of_any_kind():
    results = run(4, on_axes_case)
    assert results[0] == results[1] and results[2] == results[3]
    for found in results[0] + results[3]:
        assert not found.failures(BOUNDS[torch.float64])
        assert INPUT_GRADIENT in found.errors and set(found.gradients) == {
            "embedding.weight", "left.weight", "left.bias", "right.weight", "out.weight"
        }  # fmt: skip


class Spoilt(Mixed):
    """Adds `amount` to the gradient of one parameter on the last rank, or to the weight itself."""

    def __init__(self, axis, amount, what) -> None:
        super().__init__(axis)
        if axis.degree > 1 and axis.rank == axis.degree - 1:
            parameter = {"shard": self.left.bias, "y": self.right.weight}[what]
            parameter.register_hook(lambda grad: grad + amount)


def spoilt_case(amount, what) -> Parity:
    return compare(
        dist.group.WORLD, lambda axis: Spoilt(axis, amount, what), lambda module, inputs: module(*inputs), mixed_inputs()
    )


@pytest.mark.parametrize("amount", [1e-6, math.nan, math.inf])
def test_an_error_on_the_last_rank_is_everybodys_result(amount):
    for found in run(3, spoilt_case, amount, "shard"):
        assert GRADIENTS in found.failures(BOUNDS[torch.float64])
        assert math.isinf(found.gradients["left.bias"]) != math.isfinite(amount)
        assert found.worst_parameter()[0] == "left.bias" or not math.isfinite(amount)  # a NaN spreads to all weights


def test_the_worse_of_two_passes_is_kept():
    first = Parity({"output": 1.0}, {"a": 0.5}, {}, ["a"])
    both = first.merge(Parity({"output": math.inf, "input gradient": 2.0}, {"a": 0.1, "b": 0.2}, {}, ["a", "b"]))
    assert both == Parity({"output": math.inf, "input gradient": 2.0}, {"a": 0.5, "b": 0.2}, {}, ["a", "b"])
    assert set(both.failures(BOUNDS[torch.float64])) == {"output", "input gradient", COPIES}


def test_relative_error():
    one = torch.ones(3)
    assert relative_error(one, one) == 0.0 and relative_error(one * 3, one * 2) == 0.5
    assert relative_error(one, one * 0) == math.inf and relative_error(one * 0, one * 0) == 0.0
    assert relative_error(one * 0 + 1e-3, one * 0, least_scale=1.0) == pytest.approx(1e-3)
    assert relative_error(one * math.nan, one) == relative_error(one, one * math.inf) == math.inf


def test_bounds_are_stated_for_every_kind():
    for dtype, bounds in BOUNDS.items():
        assert bounds["initial weights"] == 0.0 and all(bounds_of(dtype, "model")[kind] >= bounds[kind] for kind in bounds)
