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

TINY = ("model.hidden_size=32", "model.num_heads=6", "model.mlp.hidden_size=50", "model.vocab_size=31")
TINY += ("model.num_layers=1",)
GROUPED = ("attention.head_dim=8", "attention.bias=all")
# Between them they meet every mutant: KV heads on several ranks of three, both norms, gate, dropout, biases, latents.
CONFIGURATIONS = {
    "full": (
        *("attention=gqa", *GROUPED, "attention.num_kv_heads=2", "attention.qk_norm=full"),
        *("attention.gate=elementwise", "attention.dropout=0.1"),
    ),
    "head": ("attention=mqa", *GROUPED, "attention.qk_norm=head"),
    "latent": (
        *("attention=mla", "attention.kv_lora_rank=16", "attention.q_lora_rank=12"),
        *("attention.qk_nope_head_dim=8", "attention.qk_rope_head_dim=4", "attention.v_head_dim=8"),
    ),
}
PARTS = ("layer", "model")


def configured(name: str, dtype: torch.dtype):
    dtype_name = str(dtype).removeprefix("torch.")
    return configuration([*TINY, *CONFIGURATIONS[name], "parallel.tensor=3"], dtype_name)[0]


def mutants_case(config, dtype, seen: set[str]) -> dict[str, tuple]:
    """What the certificate says without any mutant, and of each that this configuration meets and nobody has seen yet.

    A mutant that the layer meets must be seen there, in less than the whole model."""
    axis = AxisGroup.of(dist.group.WORLD)
    met = {part: certificate.touching([certificate.SUBJECTS[part](config)], axis) for part in PARTS}
    cases = [(None, PARTS), *((name, ["layer"]) for name in met["layer"])]
    cases += [(name, ["model"]) for name in met["model"] if name not in met["layer"]]
    said = {}
    for name, parts in cases:
        if name not in seen:
            outcomes = certificate.certify(config, parts, name, steps=2).items()
            failures = {part: outcome.parity.failures(bounds_of(dtype, part)) for part, outcome in outcomes}
            said[name] = sum(outcome.hits for _, outcome in outcomes), failures
    return said


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in PRECISIONS if dtype != torch.bfloat16)],
    ids=str,
)
def test_every_mutant_is_met_and_red(dtype):
    seen: set[str] = set()
    for name in CONFIGURATIONS:
        said = run(3, mutants_case, configured(name, dtype), dtype, seen, timeout=100)
        assert said[0] == said[1] == said[2]
        assert said[0].pop(None) == (0, {part: {} for part in PARTS})
        for mutant, (hits, failures) in said[0].items():
            assert hits and any(failures.values()), f"{mutant} is not seen in {dtype}"
            seen.add(mutant)
    assert seen == {line for line in mutants.listing().splitlines() if not line.startswith(" ")}


def unmet_case(config) -> str:
    with pytest.raises(SettingsError) as caught:
        certificate.certify(config, PARTS, "head_gain_not_summed")
    return str(caught.value)


def test_a_mutant_that_touches_nothing_is_refused_and_others_are_named():
    messages = run(3, unmet_case, configured("head", torch.float64))
    assert len(set(messages)) == 1 and "head_gain_not_summed: nothing here to get wrong" in messages[0]
    assert "norm_gain_not_summed, norm_gain_summed" in messages[0] and "statistic" not in messages[0]


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
