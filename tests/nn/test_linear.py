"""One all-reduce per input in backward, and the values of linears (parity of whole layers: tests/attention, models)."""

from unittest import mock

import pytest
import torch

from parallel_attn import AxisGroup
from parallel_attn.nn import ColumnParallelLinear, Placement, RowParallelLinear, SwiGLU, column_parallel, linear
from parallel_attn.planning.parity import BOUNDS
from tests.parity import check, compare, world_axis
from tests.world import run


def bias_case():
    """Output bias 7, all weights zero: exactly 7 at any degree (a bias added on every rank gives a multiple)."""
    layer = RowParallelLinear(Placement(world_axis(), "o"), 8, 3, ((0, 5), (5, 8)), bias=True)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(7.0)
    y = layer(torch.randn(2, layer.weight.shape[1]))
    y.sum().backward()
    return y.detach().unique().tolist(), layer.bias.grad.tolist()


def test_the_row_bias_is_added_once():
    assert run(2, bias_case) == [([7.0], [2.0, 2.0, 2.0])] * 2


def order_case():
    """The all-reduce of dx is started before the weight gradients and waited for after them, and there is one."""
    axis = world_axis()
    place = Placement(axis, "m")
    layers = [ColumnParallelLinear(place.child(str(i)), 4, 6, ((0, 3), (3, 6)), bias=True) for i in range(3)]
    events = []
    start, finish = linear.start_all_reduce, linear.finish

    def started(x, axis):
        events.append("start")
        return start(x, axis)

    def finished(x, axis):
        events.append("finish")
        return finish(x, axis)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.mm.default:
                events.append("mm")
            return function(*args, **(kwargs or {}))

    x = torch.randn(5, 4, requires_grad=True)
    loss = sum(y.square().sum() for y in column_parallel(x, layers))
    with mock.patch.object(linear, "start_all_reduce", started), mock.patch.object(linear, "finish", finished), Watch():
        loss.backward()
    return events


def test_one_all_reduce_started_before_the_weight_gradients():
    assert run(2, order_case) == [["mm"] * 3 + ["start"] + ["mm"] * 3 + ["finish"]] * 2


def swiglu_case(width: int):
    def build(axis):
        return SwiGLU(Placement(axis, "mlp", 0, None, torch.float64), 10, width)

    x = torch.randn(2, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check(compare(build, lambda m, inputs: m(inputs[0]), [x]), BOUNDS[torch.float64])


@pytest.mark.parametrize("degree, width", [(2, 8), (3, 8), (4, 7)])
def test_mlp_of_a_width_that_does_not_divide(degree, width):
    run(degree, swiglu_case, width)


def test_masters_stay_fp32_under_bf16_compute():
    layer = ColumnParallelLinear(Placement(AxisGroup(), "l"), 8, 6, ((0, 6),), bias=True)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.bfloat16
    assert layer.weight.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_frozen_weights_and_inputs_without_gradient():
    layer = ColumnParallelLinear(Placement(AxisGroup(), "l"), 8, 6, ((0, 6),), bias=True)
    layer.weight.requires_grad_(False)
    layer(torch.randn(3, 8)).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad.tolist() == [3.0] * 6
