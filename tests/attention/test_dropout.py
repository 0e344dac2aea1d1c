"""Dropout masks are a function of seed, layer, step, sample, head, query and key: nothing else."""

import pytest
import torch

from parallel_attn import GroupedQueryAttention, SettingsError
from parallel_attn.initialization import Dropout


def mask(rate=0.3, seed=0, layer="a", step=0, samples=(0, 1), heads=(0, 4), queries=32, keys=32):
    dropout = Dropout(rate, seed, layer, step, torch.tensor(samples), heads)
    return dropout.block(0, queries, 0, keys, queries, keys).kept()


def test_share():
    kept = mask(queries=200, keys=200)
    assert abs((kept == 0).double().mean().item() - 0.3) < 0.002  # 320,000 weights: five standard deviations
    for dim in range(4):  # no row, column, head or sample stands out
        others = [other for other in range(4) if other != dim]
        assert ((kept == 0).double().mean(others) - 0.3).abs().max() < 0.05


@pytest.mark.parametrize("dim", range(4))
def test_neighbours_are_independent(dim):
    dropped = mask(samples=(0, 1, 2), queries=100, keys=100) == 0
    first, second = dropped.narrow(dim, 0, dropped.shape[dim] - 1), dropped.narrow(dim, 1, dropped.shape[dim] - 1)
    assert abs((first & second).double().mean().item() - 0.09) < 0.005


@pytest.mark.parametrize("change", [{"seed": 1}, {"layer": "b"}, {"step": 1}, {"samples": (2, 3)}, {"heads": (4, 8)}], ids=str)
def test_every_coordinate_counts(change):
    first, second = mask() == 0, mask(**change) == 0
    assert abs((first & second).double().mean().item() - 0.09) < 0.02  # as independent masks agree


def test_a_part_of_the_heads_or_samples_or_queries_is_a_part_of_the_masks():
    whole = mask()
    assert torch.equal(mask(heads=(2, 3)), whole[:, 2:3])
    assert torch.equal(mask(samples=(1,)), whole[1:])
    dropout = Dropout(0.3, 0, "a", torch.tensor(0), torch.tensor([0, 1]), (0, 4))
    assert torch.equal(dropout.block(8, 16, 4, 32, 32, 32).kept(), whole[:, :, 8:16, 4:])
    slots = torch.tensor([3, 5, 9])
    part = dropout.part(1, slots, slots).block(0, 3, 0, 3, 3, 3).kept()
    assert torch.equal(part, whole[1:, :, slots][..., slots])


def test_samples_of_32_bits_are_the_same_samples():
    short, long = (Dropout(0.3, 0, "a", 3, torch.tensor([5, 9], dtype=kind), (0, 2)) for kind in (torch.int32, torch.int64))
    assert torch.equal(short.keys, long.keys)


def layer(**settings):
    return GroupedQueryAttention(16, num_heads=4, name="a", dtype=torch.float64, dropout=0.3, **settings)


def test_a_lone_layer_that_trains_must_be_told_step_and_samples():
    attention, x = layer(), torch.randn(2, 5, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="attention.dropout=0.3 in training: forward needs samples"):
        attention(x)
    with pytest.raises(ValueError, match="step"):
        attention(x, samples=torch.arange(2))


def test_no_dropout_outside_training():
    attention, x = layer().eval(), torch.randn(2, 5, 16, dtype=torch.float64)
    plain = GroupedQueryAttention(16, num_heads=4, name="a", dtype=torch.float64)
    assert torch.equal(attention(x), attention(x))
    torch.testing.assert_close(attention(x), plain(x))


def test_the_mean_over_many_steps_is_the_layer_without_dropout():
    attention = layer()
    x = torch.randn(1, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outs = torch.stack([attention(x, samples=torch.tensor([0]), step=step) for step in range(2000)])
        error = (outs.mean(0) - attention.eval()(x)) / (outs.std(0) / 2000**0.5)
    assert error.abs().max() < 4.5  # standard errors, over 96 elements


def test_the_derivative_is_that_of_the_masked_function():
    attention = layer(soft_cap=2.0, sinks=True)
    x = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    given = {"samples": torch.tensor([7]), "step": 3}
    assert torch.autograd.gradcheck(lambda x: attention(x, **given), x)


@pytest.mark.parametrize("rate", [1.0, -0.1, True, "much"])
def test_rates_that_cannot_be(rate):
    with pytest.raises(SettingsError, match="attention.dropout="):
        GroupedQueryAttention(16, num_heads=4, dropout=rate)
