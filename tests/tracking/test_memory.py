"""Memory by kind, against counts made by hand. Sizes in elements; `width` is the bytes of an element."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from parallel_attn.tracking import MemoryMeter, tensor_bytes

DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bf16")]
ROWS, IN, HIDDEN, OUT = 32, 8, 64, 4


def stack(dtype):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(IN, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, OUT, bias=False))
    return layers.to(dtype), torch.randn(ROWS, IN, dtype=dtype)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), foreach=False)


def train(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps_before", [0, 1], ids=["first-step", "second-step"])
def test_linear_stack_by_hand(dtype, steps_before):
    model, x = stack(dtype)
    optimizer = adamw(model)
    for _ in range(steps_before):
        train(model, optimizer, x)
    with MemoryMeter(parameters=model, optimizer=optimizer) as meter:
        train(model, optimizer, x)
    width = dtype.itemsize
    weights = (IN * HIDDEN + HIDDEN * OUT) * width
    counters = 2 * 4  # AdamW's `step`, a float32 scalar per parameter
    # The peak is in tanh's backward: the batch, tanh's saved output, the gradient that comes in and the one that goes
    # out, the loss and its gradient (scalars). By then the second weight's gradient has been accumulated.
    activations = (ROWS * IN + 3 * ROWS * HIDDEN + 2) * width
    optimizer_bytes = 2 * weights + counters
    there = weights + HIDDEN * OUT * width + (optimizer_bytes if steps_before else 0)
    assert meter.report() == {
        "memory/parameters_bytes": weights,
        "memory/gradients_bytes": weights,
        "memory/optimizer_bytes": optimizer_bytes,
        "memory/activations_peak_bytes": activations,
        "memory/total_peak_bytes": there + activations,
    }


def test_saved_activations_of_a_deep_stack_add_up():
    # Each sigmoid saves its output; the inputs of the linears are those same storages.
    def peak(depth):
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(HIDDEN, HIDDEN), nn.Sigmoid())])
        x = torch.randn(ROWS, HIDDEN)
        with MemoryMeter(parameters=model) as meter:
            model(x).sum().backward()
        return meter.report()["memory/activations_peak_bytes"]

    assert peak(9) - peak(4) == 5 * ROWS * HIDDEN * 4


def test_a_temporary_that_is_gone_counts_in_the_peak_only():
    weight = nn.Parameter(torch.ones(10))
    with MemoryMeter(parameters=[weight]) as meter:
        big = torch.ones(100_000)
        del big
        (weight * 2).sum().backward()
    assert meter.report()["memory/activations_peak_bytes"] == 400_000
    assert meter.report()["memory/total_peak_bytes"] == 400_000 + 40

    with MemoryMeter(parameters=[weight]) as meter:
        first = torch.ones(100_000)
        del first
        second = torch.ones(60_000)
        del second
    assert meter.report()["memory/activations_peak_bytes"] == 400_000  # one after the other, never both


def test_views_and_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("table", torch.zeros(7))

        def forward(self, tokens):
            hidden = self.embedding(tokens)
            views = [hidden.view(-1), hidden.transpose(0, 1), hidden[1:]]
            return self.head(hidden).sum() + 0 * sum(view.sum() for view in views).detach()

    model = Tied()
    with MemoryMeter(parameters=model) as meter:
        model(torch.arange(5)).backward()
    report = meter.report()
    assert report["memory/parameters_bytes"] == 50 * 16 * 4 + 7 * 4
    assert report["memory/gradients_bytes"] == 50 * 16 * 4
    assert tensor_bytes([model.head.weight, model.embedding.weight, model.table]) == 50 * 16 * 4 + 7 * 4
    base = torch.zeros(100, dtype=torch.float64)
    assert tensor_bytes([base[:3], base[50:], base.view(10, 10)]) == 800


def test_slices_of_one_buffer_as_gradients_count_once_and_whole():
    # As DDP's bucket views: every gradient a slice of one flat buffer that is longer than their sum.
    model, x = stack(torch.float32)
    bucket = torch.zeros(1000)
    offset = 0
    for parameter in model.parameters():
        parameter.grad = bucket[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    with MemoryMeter(parameters=model) as meter:
        model(x).sum().backward()
    assert meter.report()["memory/gradients_bytes"] == 4000


def test_gradients_from_before_are_never_activations():
    weight = nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    with MemoryMeter(parameters=[weight]) as meter:
        weight.sum().backward()  # accumulates in place: the old gradient is an operator's argument
    assert meter.report()["memory/gradients_bytes"] == 4000
    assert meter.report()["memory/activations_peak_bytes"] == 8  # the loss and its gradient


def test_gradients_that_are_assigned_move_when_the_optimizer_steps():
    master = nn.Parameter(torch.ones(1000))
    half = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([master], lr=0.1, momentum=0.9, foreach=False)
    with MemoryMeter(parameters=[half], optimizer=optimizer) as meter:
        (half * 2).sum().backward()
        master.grad = half.grad.float()
        half.grad = None
        optimizer.step()
        optimizer.zero_grad()
    report = meter.report()
    assert report["memory/parameters_bytes"] == 2000
    assert report["memory/gradients_bytes"] == 4000
    assert report["memory/optimizer_bytes"] == 4000 + 4000  # the master and its momentum


def test_numbers_do_not_change_and_nothing_is_kept_alive():
    def run(metered):
        model, x = stack(torch.float32)
        optimizer = adamw(model)
        if metered:
            with MemoryMeter(parameters=model, optimizer=optimizer) as meter:
                train(model, optimizer, x)
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            return model, meter
        train(model, optimizer, x)
        return model, None

    resize = torch.UntypedStorage.resize_
    plain, _ = run(False)
    metered, meter = run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), metered.parameters(), strict=True))
    assert torch.UntypedStorage.resize_ is resize
    dead = weakref.ref(next(metered.parameters()).untyped_storage())
    del metered
    gc.collect()
    assert dead() is None and meter.report()["memory/parameters_bytes"] > 0


def test_resized_storages_are_followed():
    weight = nn.Parameter(torch.ones(10))
    with MemoryMeter(parameters=[weight]) as meter:
        gathered = torch.ones(10_000)
        gathered.untyped_storage().resize_(0)  # as FSDP2 frees what it has gathered
        other = torch.ones(9_000)
        other.resize_(11_000)
    assert meter.report()["memory/activations_peak_bytes"] == 44_000


class Wrapped(torch.Tensor):
    """A wrapper subclass, as DTensor is one; each operator makes a temporary of 5,000 elements inside."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        torch.ones(5000)
        return cls(func(*[arg.inner if isinstance(arg, cls) else arg for arg in args], **(kwargs or {})))


def test_what_happens_inside_a_wrapper_counts():
    outer = Wrapped(torch.ones(100))
    with MemoryMeter(parameters=[nn.Parameter(torch.ones(1))]) as meter:
        outer * 2
    assert meter.report()["memory/activations_peak_bytes"] == 20_000  # gone before the operator inside makes its 400
    assert tensor_bytes([outer, outer.inner]) == 400


def test_report_before_the_end_says_so():
    with MemoryMeter(parameters=[nn.Parameter(torch.ones(1))]) as meter, pytest.raises(RuntimeError, match="not ended"):
        meter.report()


def test_collectives_ddp_and_dtensor_under_the_meter():
    # A process of its own: a gloo group made and destroyed here would disturb other tests.
    code = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from parallel_attn.tracking import MemoryMeter
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

weight = nn.Parameter(torch.ones(1000))
with MemoryMeter(parameters=[weight]) as meter:
    summed = funcol.all_reduce(weight * 2, "sum", dist.group.WORLD)
    assert type(summed).__name__ == "AsyncCollectiveTensor"
    (summed + 1).detach()
r = meter.report()
assert r["memory/parameters_bytes"] == 4000, r
# weight * 2, its sum over the ranks, and the sum + 1: the product is freed once the sum has been waited for
assert r["memory/activations_peak_bytes"] == 8000, r

sharded = nn.Parameter(DTensor.from_local(torch.ones(1000), mesh, [Shard(0)]))
with MemoryMeter(parameters=[sharded]) as meter:
    (sharded * 3).sum().to_local().backward()
r = meter.report()
assert r["memory/parameters_bytes"] == 4000 and r["memory/gradients_bytes"] == 4000, r

for view in (False, True):
    model = nn.parallel.DistributedDataParallel(nn.Linear(100, 10, bias=False), gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with MemoryMeter(parameters=model, optimizer=optimizer) as meter:
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
    r = meter.report()
    assert r["memory/parameters_bytes"] == 4000 and r["memory/gradients_bytes"] == 4000, (view, r)
dist.destroy_process_group()
print("all counted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "all counted" in done.stdout, done.stderr
