import pytest
import torch
import torch.distributed as dist

from parallel_attn import collectives as C
from tests.parity import world_axis
from tests.world import run

RANGES = {2: ((0, 3), (3, 5)), 3: ((0, 3), (3, 5), (5, 6)), 4: ((0, 1), (1, 4), (4, 5), (5, 6))}


def exchanged(x):
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, x.detach().clone())
    return pieces


def pairs_case(dim: int, dtype: torch.dtype):
    """Each collective and its backward against sums and concatenations made by plain object exchange."""
    axis = world_axis()
    ranges = RANGES[axis.degree]
    start, stop = ranges[axis.rank]
    generator = torch.Generator().manual_seed(axis.rank)
    total = ranges[-1][1]

    def tensor(length):
        shape = [4, 2, 3]
        shape[dim] = length
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def run_one(function, x, *arguments):
        x = x.requires_grad_()
        y = function(x, axis, *arguments)
        grad = tensor(y.shape[dim])
        y.backward(grad)
        return y.detach(), x.grad, exchanged(x), exchanged(grad)

    def close(got, wanted):
        assert got.dtype == dtype and got.shape == wanted.shape
        torch.testing.assert_close(got.double(), wanted.double(), rtol=0.02 if dtype == torch.bfloat16 else 1e-12, atol=0.05 if dtype == torch.bfloat16 else 1e-12)

    y, dx, xs, grads = run_one(C.copy, tensor(total))
    close(y, xs[axis.rank]), close(dx, sum(g.double() for g in grads))
    y, dx, xs, grads = run_one(C.reduce, tensor(total))
    close(y, sum(x.double() for x in xs)), close(dx, grads[axis.rank])
    y, dx, xs, grads = run_one(C.gather, tensor(stop - start), dim, ranges)
    close(y, torch.cat(xs, dim)), close(dx, grads[axis.rank].narrow(dim, start, stop - start))
    y, dx, xs, grads = run_one(C.scatter, tensor(total), dim, ranges)
    close(y, xs[axis.rank].narrow(dim, start, stop - start)), close(dx, torch.cat(grads, dim))
    y, dx, xs, grads = run_one(C.all_gather, tensor(stop - start), dim, ranges)
    close(y, torch.cat(xs, dim)), close(dx, sum(g.double() for g in grads).narrow(dim, start, stop - start))
    y, dx, xs, grads = run_one(C.reduce_scatter, tensor(total), dim, ranges)
    close(y, sum(x.double() for x in xs).narrow(dim, start, stop - start)), close(dx, torch.cat(grads, dim))


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 2, -1], ids=["dim0", "dim2", "last"])
def test_pairs_with_uneven_slices(degree, dim):
    run(degree, pairs_case, dim % 3, torch.float64)


def test_bfloat16_travels_as_bfloat16():
    run(2, pairs_case, 1, torch.bfloat16)


def odd_inputs_case():
    axis = world_axis()
    x = torch.arange(12.0).view(3, 4).t() + axis.rank  # strided
    before = x.clone()
    y = C.reduce(x, axis)
    assert torch.equal(y, torch.arange(12.0).view(3, 4).t() * 2 + 1) and torch.equal(x, before)
    x = torch.ones(4, 3, requires_grad=True)
    C.copy(x, axis).sum().backward()  # hands over a stride-0 gradient
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))
    x = torch.ones(4, 2, requires_grad=True)
    C.all_gather(x, axis, 1, ((0, 2), (2, 4))).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 2), 2.0))
    for empty in (torch.zeros(0, 3), torch.zeros(2, 0)):
        assert C.reduce(empty, axis).shape == empty.shape
        assert C.copy(empty.requires_grad_(), axis).shape == empty.shape
    got = C.gather(torch.zeros(0, 4), axis, 1, ((0, 4), (4, 8)))
    assert got.shape == (0, 8)
    got = C.reduce_scatter(torch.zeros(0, 4), axis, 1, ((0, 1), (1, 4)))
    assert got.shape == (0, (1, 3)[axis.rank])
    grad = torch.ones(3)
    leaf = torch.zeros(3, requires_grad=True)
    C.copy(leaf, axis).backward(grad)
    assert torch.equal(grad, torch.ones(3)), "the caller's gradient was reduced in place"


def test_strided_stride_zero_and_empty_inputs_and_no_write_to_the_callers_tensor():
    run(2, odd_inputs_case)


def compiled_case(backend: str):
    from parallel_attn.nn import Placement, ColumnParallelLinear, RowParallelLinear

    axis = world_axis()
    place = Placement(axis, "m", 0, None, torch.float64)
    ranges = ((0, 5), (5, 8))
    up = ColumnParallelLinear(place.child("up"), 6, 8, ranges, bias=True)
    down = RowParallelLinear(place.child("down"), 8, 6, ranges, bias=True)
    gain = torch.ones(6, dtype=torch.float64, requires_grad=True)

    def forward(x):
        y = down(torch.tanh(up(x)))
        z = C.all_gather(C.reduce_scatter(y * C.copy(gain, axis), axis, 1, ((0, 2), (2, 4))), axis, 1, ((0, 2), (2, 4)))
        return z + C.gather(C.scatter(y, axis, -1, ((0, 4), (4, 6))), axis, -1, ((0, 4), (4, 6)))

    def everything(function, batch):
        x = torch.randn(batch, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(batch)).requires_grad_()
        parameters = [*up.parameters(), *down.parameters(), gain]
        for p in parameters:
            p.grad = None
        y = function(x)
        (y * torch.arange(y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in parameters)]

    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    for batch in (2, 3):  # a second shape too
        for got, wanted in zip(everything(compiled, batch), everything(forward, batch)):
            torch.testing.assert_close(got, wanted)


def test_traceable_by_torch_compile_as_one_graph():
    run(2, compiled_case, "aot_eager", timeout=120)


@pytest.mark.slow
def test_compiled_by_inductor():
    run(2, compiled_case, "inductor", timeout=280)


def one_rank_case():
    axis = world_axis()
    x = torch.randn(3, 4, requires_grad=True)
    for function in (C.copy, C.reduce):
        assert function(x, axis) is x
    for function in (C.gather, C.scatter, C.all_gather, C.reduce_scatter):
        assert function(x, axis, 1, ((0, 4),)) is x


def test_over_one_rank_nothing_happens():
    run(1, one_rank_case)
