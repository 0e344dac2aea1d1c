"""Every mutant turns the certificate red in every dtype, and none is left unmet."""

import pytest
import torch
import torch.distributed as dist

from parallel_attn import AxisGroup, SettingsError
from parallel_attn.nn import linear, norm
from parallel_attn.planning import certificate, mutants
from parallel_attn.planning.parity import bounds_of
from parallel_attn.planning.subjects import PRECISIONS
from parallel_attn.planning.verify import configuration
from tests.world import run

TINY = ("model.hidden_size=32", "model.num_heads=6", "attention.head_dim=8", "model.mlp.hidden_size=50", "model.vocab_size=31")
# Between them they meet every mutant: KV heads on several ranks of three, both norms, biases.
CONFIGURATIONS = {
    "full": ("attention=gqa", "attention.num_kv_heads=2", "attention.bias=all", "attention.qk_norm=full"),
    "head": ("attention=mqa", "attention.bias=all", "attention.qk_norm=head"),
}
PARTS = ("layer", "model")


def configured(name: str, dtype: torch.dtype):
    dtype_name = str(dtype).removeprefix("torch.")
    return configuration([*TINY, *CONFIGURATIONS[name], "parallel.tensor=3"], dtype_name)[0]


def mutants_case(config, dtype) -> dict[str, dict]:
    """Which mutants this configuration meets, and what the certificate says without any and with each."""
    axis = AxisGroup.of(dist.group.WORLD)
    met = certificate.touching([certificate.SUBJECTS[part](config) for part in PARTS], axis)
    said = {}
    for name in [None, *met]:
        outcomes = certificate.certify(config, PARTS, name)
        said[name] = {
            part: (outcome.hits, outcome.parity.failures(bounds_of(dtype, part))) for part, outcome in outcomes.items()
        }
    return said


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_every_mutant_is_met_and_red(dtype):
    met = set()
    for name in CONFIGURATIONS:
        said = run(3, mutants_case, configured(name, dtype), dtype, timeout=100)
        assert said[0] == said[1] == said[2]
        clean = said[0].pop(None)
        assert clean == {part: (0, {}) for part in PARTS}
        for mutant, outcomes in said[0].items():
            assert any(failures for _, failures in outcomes.values()), f"{mutant} is not seen in {dtype}: {outcomes}"
            assert any(hits for hits, _ in outcomes.values())
            met.add(mutant)
    assert met == {line for line in mutants.listing().splitlines() if not line.startswith(" ")}


def unmet_case(config) -> str:
    with pytest.raises(SettingsError) as caught:
        certificate.certify(config, PARTS, "full_norm_gain_not_summed")
    return str(caught.value)


def test_a_mutant_that_touches_nothing_is_refused_and_others_are_named():
    messages = run(3, unmet_case, configured("head", torch.float64))
    assert len(set(messages)) == 1 and "full_norm_gain_not_summed: nothing here to get wrong" in messages[0]
    assert "head_norm_gain_not_summed" in messages[0] and "statistic" not in messages[0]


def test_code_is_as_it_was_after_a_mutant_also_after_an_error():
    before = linear.reduce, norm.copy, linear.RowParallelLinear.forward
    with pytest.raises(ZeroDivisionError), mutants.watched():
        assert linear.reduce is not before[0]
        1 / 0  # noqa: B018
    assert (linear.reduce, norm.copy, linear.RowParallelLinear.forward) == before


def test_over_one_rank_nothing_is_hit():
    with mutants.applied("output_not_summed") as patches:
        x = torch.ones(2)
        assert linear.reduce(x, AxisGroup()) is x and linear.reduce(x, axis=AxisGroup()) is x
    assert patches.hits == {"output_not_summed": 0}
