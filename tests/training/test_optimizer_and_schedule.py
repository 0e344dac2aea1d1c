import math

import pytest
import torch

from parallel_attn import AxisGroup, SettingsError
from parallel_attn.training import Cosine, clip_gradients, gradient_norm, parameter_groups
from parallel_attn.training.optimizer import AdamW, AdamWConfig
from parallel_attn.training.schedule import CosineConfig
from tests.models.test_decoder import small


def rates(steps, **settings):
    schedule = Cosine(CosineConfig(**settings), 1.0, steps)
    return [schedule.rate(step) for step in range(steps)]


def test_cosine_is_exact_at_its_ends():
    got = rates(101, warmup_steps=20, final_fraction=0.1)
    assert got[0] == 1 / 20 and got[19] == 1.0 and got[20] == 1.0 and got[100] == pytest.approx(0.1, abs=1e-15)
    assert got[60] == pytest.approx(0.55)  # half way down
    assert all(a >= b for a, b in zip(got[19:], got[20:]))


@pytest.mark.parametrize("steps, warmup", [(1, 0), (2, 1), (1, None), (3, 0), (19, None)])
def test_odd_lengths_are_defined(steps, warmup):
    got = rates(steps, warmup_steps=warmup)
    assert all(0 < rate <= 1 for rate in got) and max(got) == 1.0
    if steps - (warmup or 0) > 1:
        assert got[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("steps, warmup", [(1, 1), (10, 10), (10, 11), (10, -1)])
def test_a_warm_up_that_never_ends_is_refused(steps, warmup):
    with pytest.raises(SettingsError, match=rf"schedule.warmup_steps={warmup} must lie in 0 .. {steps - 1}"):
        rates(steps, warmup_steps=warmup)


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


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_an_update_that_is_not_finite_changes_nothing(poison):
    from parallel_attn.training.engine import TorchEngine, TorchEngineConfig
    from parallel_attn.mesh import Mesh

    model, _ = with_gradients()
    axis = AxisGroup()
    engine = TorchEngine(model, Mesh(None, torch.device("cpu"), axis, axis, axis), TorchEngineConfig(), AdamWConfig())
    engine.step(0.1, torch.tensor(True))
    model.embedding.weight.grad[0, 0] = poison
    before = [t.clone() for t in (*model.parameters(), *engine.optimizer_tensors())]
    norm = engine.step(0.1, torch.tensor(True))
    assert not norm.isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *engine.optimizer_tensors())))
