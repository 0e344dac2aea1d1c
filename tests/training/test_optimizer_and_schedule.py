import math

import pytest
import torch

from parallel_attn import AxisGroup, SettingsError
from parallel_attn.training import Constant, Cosine, WarmupStableDecay, clip_gradients, gradient_norm, parameter_groups
from parallel_attn.training.optimizer import AdamW, AdamWConfig
from tests.models.test_decoder import small


def rates(steps, kind=Cosine, **settings):
    schedule = kind(kind.Config(**settings), 1.0, steps)
    return [schedule.rate(step) for step in range(steps)]


def test_cosine_is_exact_at_its_ends():
    got = rates(101, warmup_steps=20, final_fraction=0.1)
    assert got[0] == 1 / 20 and got[19] == 1.0 and got[20] == 1.0 and got[100] == pytest.approx(0.1, abs=1e-15)
    assert got[60] == pytest.approx(0.55)  # half way down
    assert all(a >= b for a, b in zip(got[19:], got[20:]))


def test_warmup_stable_decay_is_exact_at_its_ends():
    got = rates(100, WarmupStableDecay, warmup_steps=10, decay_steps=20, final_fraction=0.2)
    assert got[9:80] == [1.0] * 71 and got[80] == pytest.approx(1 - 0.8 / 20) and got[99] == pytest.approx(0.2)
    assert rates(100, WarmupStableDecay)[79] == 1.0 and rates(100, WarmupStableDecay)[80] < 1.0  # a fifth by default
    assert rates(10, WarmupStableDecay, warmup_steps=0, decay_steps=10, final_fraction=0.0)[-1] == 0.0


def test_constant_stays():
    assert rates(7, Constant, warmup_steps=2) == [0.5, *[1.0] * 6]


@pytest.mark.parametrize("kind", [Cosine, WarmupStableDecay, Constant])
@pytest.mark.parametrize("steps, warmup", [(1, 0), (2, 1), (1, None), (3, 0), (19, None), (4, 3)])
def test_odd_lengths_are_defined(kind, steps, warmup):
    got = rates(steps, kind, warmup_steps=warmup)
    assert len(got) == steps and all(0 < rate <= 1 for rate in got) and max(got) == 1.0


def test_the_floor_is_reached_in_short_runs():
    for steps in (2, 3, 19):
        assert rates(steps, warmup_steps=0)[-1] == pytest.approx(0.1)
        assert rates(steps, WarmupStableDecay, warmup_steps=0, decay_steps=1)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", [Cosine, WarmupStableDecay, Constant])
@pytest.mark.parametrize("steps, warmup", [(1, 1), (10, 10), (10, 11), (10, -1)])
def test_a_warm_up_that_never_ends_is_refused(kind, steps, warmup):
    with pytest.raises(SettingsError, match=rf"schedule.warmup_steps={warmup} must lie in 0 .. {steps - 1}"):
        rates(steps, kind, warmup_steps=warmup)


@pytest.mark.parametrize("decay", [-1, 91])
def test_a_decay_that_does_not_fit_is_refused(decay):
    with pytest.raises(SettingsError, match=rf"schedule.decay_steps={decay} must lie in 0 .. 90"):
        rates(100, WarmupStableDecay, warmup_steps=10, decay_steps=decay)


def test_weight_decay_hits_matrices_only():
    """Zero gradient, huge decay: what moves is what is decayed."""
    model = small(AxisGroup())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = AdamW.build(model, AdamWConfig(lr=0.01, weight_decay=10.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert {"head.weight", "embedding.weight", "layers.0.attention.k.weight"} <= moved
    assert len(parameter_groups(model, 0.1)) == 2


def with_gradients():
    model = small(AxisGroup())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, torch.cat([p.grad.flatten() for p in model.parameters()]).norm()


def test_clipping_without_gradients_does_nothing():
    clip_gradients(small(AxisGroup()), torch.tensor(1.0), 0.1)


@pytest.mark.parametrize("limit", [0.1, 1e6, None])
def test_clipping(limit):
    model, norm = with_gradients()
    before = [p.grad.clone() for p in model.parameters()]
    torch.testing.assert_close(gradient_norm(model, AxisGroup()), norm)
    clip_gradients(model, norm, limit)
    factor = 0.1 / norm if limit == 0.1 else 1.0
    for parameter, grad in zip(model.parameters(), before):
        torch.testing.assert_close(parameter.grad, grad * factor)
        assert limit == 0.1 or torch.equal(parameter.grad, grad)


def moments(engine):
    return [value for state in engine.optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_an_update_that_is_not_finite_changes_nothing(poison):
    from parallel_attn.training.engines import Job, TorchEngine, TorchEngineConfig
    from parallel_attn.mesh import Mesh

    model, _ = with_gradients()
    axis = AxisGroup()
    mesh = Mesh(None, torch.device("cpu"), axis, axis, axis)
    engine = TorchEngine(model, Job(mesh, AdamW, AdamWConfig(), "fp64", 1, 1), TorchEngineConfig())
    engine.step(0.1, torch.tensor(True))
    model.embedding.weight.grad[0, 0] = poison
    before = [t.clone() for t in (*model.parameters(), *moments(engine))]
    norm = engine.step(0.1, torch.tensor(True))
    assert not norm.isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *moments(engine))))
