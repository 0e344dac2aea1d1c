"""Parity of a sharded module with one process: every number that training uses, compared in full.

The reference is the same class on one rank, fed with the same full tensors; it lives on the first rank of the axis. The
slices of the sharded one are collected by plain all-gathers: none of the code under test takes part in that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_attn.initialization import named_generator
from parallel_attn.mesh import AxisGroup
from parallel_attn.nn import parameter_shards, sharded_parameters
from parallel_attn.sharding import ParameterShard
from parallel_attn.training import gradient_norm

OUTPUT, INPUT_GRADIENT, GRADIENTS, NORM = "output", "input gradient", "parameter gradients", "gradient norm"
OWN_NORM, INITIAL, WEIGHTS, COPIES = "norm over ranks", "initial weights", "weights after steps", "copies"
KINDS = (OUTPUT, INPUT_GRADIENT, GRADIENTS, NORM, OWN_NORM, WEIGHTS, INITIAL)

# Initial weights come from the same generators: bitwise equal in every dtype, as copies are.
BOUNDS = {
    torch.float64: dict.fromkeys(KINDS, 1e-10) | {INITIAL: 0.0},
    torch.float32: dict.fromkeys(KINDS, 1e-5) | {INITIAL: 0.0},
    # Compute in bf16, weights and their gradients in float32: measured rounding, with room above it (README, Certificate).
    torch.bfloat16: dict.fromkeys(KINDS, 5e-2) | {GRADIENTS: 0.1, OWN_NORM: 1e-5, INITIAL: 0.0},
}
"""By dtype and kind: how much rounding may do to an error, as a share of its scale."""


def bounds_of(dtype: torch.dtype, part: str) -> dict[str, float]:
    """The bounds for a "layer" or a whole "model", in which a block inherits the rounding of all others."""
    wider = {torch.float32: 1e-4, torch.bfloat16: 0.5}
    return BOUNDS[dtype] | ({GRADIENTS: wider[dtype]} if part == "model" and dtype in wider else {})


GRADIENT_FLOOR = 1e-3
"""Some gradients are zero in theory (a key bias without rope): this share of the module's largest is the least scale."""

RATE, MOMENTUM = 0.05, 0.9  # of the SGD that takes the steps; AdamW would turn rounding into steps of full size


@dataclass
class Parity:
    """The largest error of each kind as a share of its scale (infinite where a number is not finite).

    errors: by kind; a kind that a module does not have (no input with a gradient) is missing
    gradients, weights: by full name of the parameter
    unequal: names of parameters of which two ranks hold copies that are not bitwise equal (weight or gradient)
    """

    errors: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)

    def merge(self, other: Parity) -> Parity:
        """The worse of both, for two passes over one module."""
        both = Parity()
        for name in ("errors", "gradients", "weights"):
            mine, theirs = getattr(self, name), getattr(other, name)
            worst = {key: max(mine.get(key, 0.0), theirs.get(key, 0.0)) for key in {**mine, **theirs}}
            setattr(both, name, worst)
        both.unequal = list(dict.fromkeys(self.unequal + other.unequal))
        return both

    def failures(self, bounds: Mapping[str, float]) -> dict[str, str]:
        """What does not hold, by kind (`COPIES` too), in words."""
        found = {}
        for kind, error in self.errors.items():
            if not error <= bounds[kind]:
                found[kind] = f"{error:.1e} is beyond {bounds[kind]:g}"
        if self.unequal:
            found[COPIES] = f"not bitwise equal: {', '.join(self.unequal)}"
        return found

    def worst_parameter(self) -> tuple[str, float] | None:
        """Name and error of the parameter whose gradient is furthest off."""
        return max(self.gradients.items(), key=lambda item: item[1], default=None)

    def _add(self, kind: str, got: Tensor, wanted: Tensor, *, least_scale: float = 0.0, name: str = "") -> None:
        error = relative_error(got, wanted, least_scale)
        self.errors[kind] = max(self.errors.get(kind, 0.0), error)
        by_name = {GRADIENTS: self.gradients, WEIGHTS: self.weights}.get(kind)
        if by_name is not None:
            by_name[name] = max(by_name.get(name, 0.0), error)


def relative_error(got: Tensor, wanted: Tensor, least_scale: float = 0.0) -> float:
    """Largest difference / largest element of `wanted` (or `least_scale` if that is more); infinite for a NaN or an inf."""
    if got.numel() == 0:
        return 0.0
    got, wanted = got.double().cpu(), wanted.double().cpu()
    difference = (got - wanted).abs().max().item()
    if not math.isfinite(difference):
        return math.inf
    scale = max(wanted.abs().max().item(), least_scale)
    return difference / scale if scale else (math.inf if difference else 0.0)


def set_parameters(module: nn.Module, seed: int = 0) -> None:
    """Full tensors by name, sliced: weights of std 1/sqrt(fan in), gains 1 +- 0.3 (or +- 0.3), biases of order one, so
    that activations, logits and gradients are of order one and no wrong gradient hides behind a small number."""
    with torch.no_grad():
        for name, parameter, shard in sharded_parameters(module):
            generator = named_generator(seed, name)
            full = torch.randn(shard.full_shape, generator=generator, dtype=torch.float64)
            if len(shard.full_shape) > 1:
                full *= shard.full_shape[-1] ** -0.5
            elif not name.endswith("bias"):
                zero_centered = getattr(module.get_submodule(name.rpartition(".")[0]), "zero_centered", False)
                full = full.clamp(-1, 1) * 0.3 + (0.0 if zero_centered else 1.0)
            parameter.copy_(full[shard.index()])


def projected(output: Tensor, seed: int = 1) -> Tensor:
    """A random projection as the loss, of order one: sum() would be blind to errors that cancel."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights *= output.numel() ** -0.5
    return (output * weights.to(output.device, output.dtype)).sum()


def gather_ranks(local: Tensor, shapes: Sequence[tuple[int, ...]], axis: AxisGroup) -> list[Tensor]:
    """Every rank's tensor, on every rank; `shapes` are theirs. One all-gather of padded flat tensors."""
    if axis.degree == 1:
        return [local.detach()]
    sizes = [math.prod(shape) for shape in shapes]
    flat = local.new_zeros(max(sizes))
    flat[: sizes[axis.rank]] = local.detach().flatten()
    pieces = [torch.empty_like(flat) for _ in range(axis.degree)]
    dist.all_gather(pieces, flat, group=axis.group)
    return [piece[:size].view(shape) for piece, size, shape in zip(pieces, sizes, shapes)]


def collect(
    local: Mapping[str, Tensor], shards: Mapping[str, ParameterShard], axis: AxisGroup
) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, full tensor out of every rank's slice, whether all copies of a slice are bitwise equal), on every rank.

    One all-gather for all of them."""
    flat = torch.cat([tensor.detach().flatten() for tensor in local.values()])
    ranks = range(axis.degree)
    sizes = {name: [math.prod(shards[name].local_shape(rank)) for rank in ranks] for name in local}
    of_ranks = gather_ranks(flat, [(sum(of[rank] for of in sizes.values()),) for rank in ranks], axis)
    parts = [dict(zip(local, piece.split([of[rank] for of in sizes.values()]))) for rank, piece in enumerate(of_ranks)]
    for name, tensor in local.items():
        shard = shards[name]
        pieces = [parts[rank][name].view(shard.local_shape(rank)).to(tensor.dtype) for rank in ranks]
        first = [next(r for r in ranks if shard.range_of(r) == shard.range_of(rank)) for rank in ranks]
        equal = all(torch.equal(pieces[rank], pieces[first[rank]]) for rank in ranks)
        slices = [pieces[rank] for rank in shard.writers]
        yield name, (slices[0] if shard.dim is None else torch.cat(slices, dim=shard.dim)), equal


def compare(
    where,
    build: Callable[[AxisGroup], nn.Module],
    forward: Callable[[nn.Module, list[Tensor]], Tensor],
    inputs: Sequence[Tensor],
    *,
    steps: int = 3,
    rate: float = RATE,
    seed: int = 0,
    mutation: AbstractContextManager | None = None,
) -> Parity:
    """Builds the module on an axis and on one rank, trains both for `steps` steps of SGD, compares all of it.

    where: the axis, as an AxisGroup, a DeviceMesh or a process group; all its ranks call this and get the same result
    build: makes the module on an axis, with names (and so initial values) of its own, not a construction number
    forward: (module, inputs) -> a scalar loss, or an output that a random projection makes one
    inputs: the same on every rank; the floating ones get gradients
    rate: learning rate of the steps; a small one keeps the rounding of one step out of the next
    mutation: a deliberate mistake, entered around everything that the sharded module does

    The second step accumulates the gradients of two passes.
    """
    axis = AxisGroup.of(where)
    mutation = nullcontext() if mutation is None else mutation
    found, reference = Parity(), None
    with mutation:
        sharded = build(axis)
    shards = parameter_shards(sharded)
    if axis.rank == 0:
        reference = build(AxisGroup())
        if list(shards) != [name for name, _ in reference.named_parameters()]:
            raise RuntimeError("the module has other parameters on one rank than on several")
    both = [module for module in (sharded, reference) if module is not None]
    _compare_parameters(found, INITIAL, sharded, reference, shards, axis)
    for module in both:
        set_parameters(module, seed)
    optimizers = [torch.optim.SGD(module.parameters(), lr=rate, momentum=MOMENTUM) for module in both]
    for step in range(steps):
        passes = 2 if step == 1 else 1
        with mutation:
            got = [*_train_pass(sharded, forward, inputs, passes), gradient_norm(sharded, axis)]
        gathered = [gather_ranks(tensor, [tuple(tensor.shape)] * axis.degree, axis) for tensor in got]
        if reference is not None:
            wanted = [*_train_pass(reference, forward, inputs, passes), gradient_norm(reference, AxisGroup())]
            kinds = [OUTPUT, *[INPUT_GRADIENT] * (len(got) - 2), NORM]
            for kind, of_ranks, one in zip(kinds, gathered, wanted):
                for tensor in of_ranks:
                    found._add(kind, tensor, one)
        squares = _compare_parameters(found, GRADIENTS, sharded, reference, shards, axis)
        for norm in gathered[-1]:
            found._add(OWN_NORM, norm, squares.sqrt())
        for optimizer in optimizers:
            optimizer.step()
    _compare_parameters(found, WEIGHTS, sharded, reference, shards, axis)
    if axis.degree > 1:
        shared = [found]
        dist.broadcast_object_list(shared, src=dist.get_global_rank(axis.group, 0), group=axis.group)
        found = shared[0]
    return found


def _train_pass(module: nn.Module, forward: Callable, inputs: Sequence[Tensor], passes: int) -> list[Tensor]:
    """Output and input gradients of the last of `passes`, whose parameter gradients accumulate."""
    module.zero_grad()
    for _ in range(passes):
        fed = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        output = forward(module, fed)
        (projected(output) if output.dim() else output).backward()
    floating = [x for x in fed if x.is_floating_point()]
    return [output.detach(), *(x.new_zeros(x.shape) if x.grad is None else x.grad for x in floating)]


def _compare_parameters(found: Parity, kind: str, sharded, reference, shards: dict, axis: AxisGroup) -> Tensor:
    """Weights or gradients of all parameters, one after another; copies too. Returns the sum of squares (float64)."""

    def value(parameter: Tensor) -> Tensor:
        if kind != GRADIENTS:
            return parameter.detach()
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    least = 0.0
    if kind == GRADIENTS and reference is not None:
        least = GRADIENT_FLOOR * max(value(p).abs().max().item() for p in reference.parameters())
    squares = torch.zeros((), dtype=torch.float64)
    local = {name: value(parameter) for name, parameter in sharded.named_parameters()}
    for name, full, equal in collect(local, shards, axis):
        if not equal and name not in found.unequal:
            found.unequal.append(name)
        if reference is not None:
            wanted = value(reference.get_parameter(name))
            found._add(kind, full, wanted, least_scale=least, name=name)
        squares += full.double().square().sum().cpu()
    return squares
