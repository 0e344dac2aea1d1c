"""What is drawn, with what probability, and on what it depends."""

import math

import pytest
import torch

from parallel_attn import SettingsError
from parallel_attn.models import Sampling
from parallel_attn.models.sampling import uniform

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.5])


def drawn(sampling, count=4000):
    picked = [sampling.pick(LOGITS.unsqueeze(0), [0], position).item() for position in range(count)]
    return torch.bincount(torch.tensor(picked), minlength=5).double() / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_softmax_says(temperature):
    wanted = torch.softmax(LOGITS.double() / temperature, 0)
    found = drawn(Sampling(temperature=temperature, seed=1))
    assert (found - wanted).abs().max() < 4 * (0.25 / 4000) ** 0.5


@pytest.mark.parametrize("top_k, kept", [(1, {1}), (2, {1, 2}), (3, {1, 2, 4}), (5, {0, 1, 2, 3, 4}), (0, {0, 1, 2, 3, 4})])
def test_top_k_keeps_exactly_k(top_k, kept):
    found = drawn(Sampling(temperature=1.0, top_k=top_k), 1500)
    assert set(found.nonzero().flatten().tolist()) == kept
    chosen = torch.tensor(sorted(kept))
    weights = torch.softmax(LOGITS[chosen].double(), 0)
    assert (found[chosen] - weights).abs().max() < 0.06


def test_top_p_keeps_the_fewest_that_reach_it():
    shares = torch.softmax(LOGITS.double(), 0).sort(descending=True)
    reached = shares.values.cumsum(0)
    for count in range(1, 6):  # just above the sum of count - 1 tokens, and just below that of count
        for top_p in (float(reached[count - 2]) + 1e-6 if count > 1 else 1e-6, min(1.0, float(reached[count - 1]) - 1e-6)):
            found = drawn(Sampling(temperature=1.0, top_p=top_p), 1500)
            assert set(found.nonzero().flatten().tolist()) == set(shares.indices[:count].tolist()), (count, top_p)


def test_greedy():
    assert Sampling().pick(LOGITS.unsqueeze(0), [0], 0).item() == 1
    assert Sampling(temperature=1.0, top_k=1, seed=9).pick(LOGITS.unsqueeze(0), [0], 0).item() == 1
    for cold in (1e-8, 1e-310, 5e-324):  # logits divided by the smallest are infinite
        assert drawn(Sampling(temperature=cold), 50)[1] == 1


def test_a_draw_depends_on_seed_prompt_and_position_only():
    sampling, rows = Sampling(temperature=2.0, seed=5), LOGITS.repeat(4, 1)
    together = sampling.pick(rows, [0, 1, 2, 3], 7).tolist()
    torch.manual_seed(123)
    alone = [sampling.pick(LOGITS.unsqueeze(0), [number], 7).item() for number in (3, 2, 1, 0)]
    assert together == alone[::-1]
    values = {uniform(seed, number, position) for seed in range(9) for number in range(9) for position in range(9)}
    assert len(values) == 9**3 and all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.04


def test_tokens_of_no_weight_never_come():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    for settings in ({}, {"top_k": 4}, {"top_p": 0.999}):
        sampling = Sampling(temperature=1.0, **settings)
        assert {sampling.pick(logits, [0], position).item() for position in range(200)} == {1, 3}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": math.nan}, "top_p=nan"),
    ],
)
def test_values_that_cannot_be(settings, message):
    with pytest.raises(SettingsError, match=message):
        Sampling(**settings)
    with pytest.raises(SettingsError, match="top_k=6 is above the vocabulary of 5"):
        Sampling(top_k=6).check_vocabulary(5)
