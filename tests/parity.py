"""Parity of a sharded module with one process: every number that training uses, compared in full.

Functions here run inside a rank of a test world. The reference is the same class on one rank (degree 1), fed with the
same full tensors; it is itself checked against code that nobody here wrote (tests/attention/test_reference.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_attn import AxisGroup, parameter_shards, sharded_parameters
from parallel_attn.initialization import named_generator
from parallel_attn.training import gradient_norm

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


def world_axis() -> AxisGroup:
    return AxisGroup.of(dist.group.WORLD)


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


def assemble(local: dict[str, Tensor], shards: dict) -> dict[str, Tensor]:
    """The full tensors out of every tensor rank's slices, by plain object exchange: none of the code under test takes part.

    Copies of one slice must be bitwise equal. Of several replicas the first is taken."""
    pieces: list = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, {name: tensor.detach() for name, tensor in local.items()})
    full = {}
    for name, shard in shards.items():
        for rank, piece in enumerate(pieces[: shard.degree]):
            first = next(r for r in range(shard.degree) if shard.range_of(r) == shard.range_of(rank))
            assert torch.equal(piece[name], pieces[first][name]), f"{name}: copies on ranks {first} and {rank} differ"
        parts = [pieces[rank][name] for rank in shard.writers]
        full[name] = parts[0] if shard.dim is None else torch.cat(parts, dim=shard.dim)
    return full


@dataclass
class Worst:
    """The largest error of each kind, as a share of its scale."""

    errors: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, got: Tensor, wanted: Tensor, scale: float | None = None) -> None:
        assert got.shape == wanted.shape, f"{kind}: {tuple(got.shape)} instead of {tuple(wanted.shape)}"
        assert got.isfinite().all() and wanted.isfinite().all(), f"{kind} is not finite"
        scale = scale or wanted.abs().max().clamp(min=1e-30).item()
        self.errors[kind] = max(self.errors.get(kind, 0.0), (got - wanted).abs().max().item() / scale)

    def check(self, bound: float) -> None:
        wrong = {kind: error for kind, error in self.errors.items() if not error <= bound}
        assert not wrong, f"beyond {bound}: {wrong}"


def compare(
    build: Callable[[AxisGroup], nn.Module],
    loss_of: Callable[[nn.Module, list[Tensor]], Tensor],
    inputs: list[Tensor],
    *,
    steps: int = 3,
) -> dict[str, float]:
    """Builds the module on the world's axis and on one rank; returns the worst errors of output loss, input gradients,
    every parameter gradient, the gradient norm, and the weights after `steps` steps of SGD with momentum."""
    axis = world_axis()
    sharded, reference = build(axis), build(AxisGroup())
    for module in (sharded, reference):
        set_parameters(module)
    shards = parameter_shards(sharded)
    assert list(shards) == [name for name, _ in reference.named_parameters()]
    worst = Worst()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.005, momentum=0.9) for m in (sharded, reference)]
    for _ in range(steps):
        results = []
        for module, optimizer in zip((sharded, reference), optimizers):
            optimizer.zero_grad()
            fed = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
            loss = loss_of(module, fed)
            loss.backward()
            results.append((loss.detach(), [x.grad for x in fed if x.is_floating_point()]))
        (loss, dx), (wanted_loss, wanted_dx) = results
        worst.add("loss", loss, wanted_loss)
        for got, wanted in zip(dx, wanted_dx):
            worst.add("input gradient", got, wanted)
        wanted_grads = {name: p.grad for name, p in reference.named_parameters()}
        largest = max(grad.abs().max().item() for grad in wanted_grads.values())
        for name, got in assemble({n: p.grad for n, p in sharded.named_parameters()}, shards).items():
            wanted = wanted_grads[name]
            # Some gradients are zero in theory (a key bias without rope): the layer's largest sets the floor.
            scale = max(wanted.abs().max().item(), 1e-3 * largest)
            worst.add(f"gradient {name}", got, wanted, scale)
        norm = torch.cat([grad.flatten() for grad in wanted_grads.values()]).norm()
        worst.add("gradient norm", gradient_norm(sharded, axis), norm)
        for optimizer in optimizers:
            optimizer.step()
    for name, got in assemble(dict(sharded.named_parameters()), shards).items():
        worst.add(f"weight {name}", got, reference.get_parameter(name).detach())
    return worst.errors


def projected(output: Tensor, seed: int = 1) -> Tensor:
    """A random projection as the loss: sum() would be blind to errors that cancel."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (output * weights.to(output.dtype)).sum()
