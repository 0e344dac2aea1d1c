"""The parity matrix of grouped-query attention, and mutants that it must catch."""

import pytest
import torch

from parallel_attn import GroupedQueryAttention
from parallel_attn.planning import Parity, mutants
from parallel_attn.planning.parity import BOUNDS
from tests.covering import pairwise
from tests.parity import check, compare, world_axis
from tests.world import run

HEADS = {  # (query heads, KV heads) for degree: multiple, fewer, one, not dividing
    2: {"multiple": (8, 4), "fewer": (6, 1), "one": (4, 1), "odd": (5, 5), "mha": (4, 4)},
    3: {"multiple": (6, 3), "fewer": (8, 2), "one": (7, 1), "odd": (8, 4), "mha": (7, 7)},
    4: {"multiple": (8, 4), "fewer": (6, 2), "one": (8, 1), "odd": (18, 6), "mha": (6, 6)},
}
FACTORS = {
    "degree": [2, 3, 4],
    "heads": ["multiple", "fewer", "one", "odd", "mha"],
    "bias": ["none", "qkv", "all"],
    "qk_norm": ["none", "head", "full"],
    "zero_centered": [False, True],
    "widths": [(8, None), (6, 10), (8, 4)],
    "rope": [("half", 1.0), ("interleaved", 1.0), ("half", 0.5)],
    "causal": [True, False],
    "masking": ["none", "padding", "documents", "both"],
    "dtype": [torch.float64, torch.float32],
}


def legal(case: dict) -> bool:
    return (case["qk_norm"] != "none" or not case["zero_centered"]) and (case["rope"][1] == 1.0 or case["widths"][0] == 8)


CASES = pairwise(FACTORS, legal)
CASES += [
    dict(degree=8, heads=heads, bias="all", qk_norm="full", zero_centered=False, widths=(8, 4), rope=("half", 1.0),
         causal=True, masking="none", dtype=torch.float64)
    for heads in ((8, 8), (12, 3), (9, 1))
]  # fmt: skip


def settings_of(case: dict) -> dict:
    heads, kv_heads = HEADS[case["degree"]][case["heads"]] if isinstance(case["heads"], str) else case["heads"]
    return dict(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=case["widths"][0],
        v_head_dim=case["widths"][1],
        bias=case["bias"],
        qk_norm=case["qk_norm"],
        qk_norm_zero_centered=case["zero_centered"],
        rope={"style": case["rope"][0], "fraction": case["rope"][1]},
        causal=case["causal"],
    )


def parity_case(case: dict, mutant: str | None = None) -> Parity:
    hidden, batch, length = 24, 2, 9
    dtype = case["dtype"]
    x = torch.randn(batch, length, hidden, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    masks = {}
    if case["masking"] in ("padding", "both"):
        masks["key_padding_mask"] = torch.arange(length) < torch.tensor([[6], [9]])
    if case["masking"] in ("documents", "both"):
        masks["document_ids"] = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] + [2] * 6])

    def build(axis):
        return GroupedQueryAttention(hidden, tensor_parallel=axis, name="layer", dtype=dtype, **settings_of(case))

    applied = mutants.applied(mutant)
    found = compare(build, lambda layer, inputs: layer(inputs[0], **masks), [x.to(dtype)], mutation=applied)
    assert all(applied.total_hits(world_axis()).values()), f"{mutant} does not touch this case"
    return found


def check_case(case: dict) -> None:
    check(parity_case(case), BOUNDS[case["dtype"]])


def failures_case(case: dict, mutant: str) -> dict[str, str]:
    return parity_case(case, mutant).failures(BOUNDS[case["dtype"]])


def name_of(case: dict) -> str:
    heads = case["heads"] if isinstance(case["heads"], str) else "x".join(map(str, case["heads"]))
    return f"tp{case['degree']}-{heads}-bias_{case['bias']}-norm_{case['qk_norm']}-{case['masking']}-{str(case['dtype'])[6:]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_sharded_layer_equals_one_process(case):
    run(case["degree"], check_case, case)


def test_covering_set_is_small_and_whole():
    assert len(CASES) <= 150
    seen = {(case["degree"], case["heads"]) for case in CASES}
    assert seen >= {(degree, heads) for degree in (2, 3, 4) for heads in HEADS[2]}


MUTANT_CASE = dict(
    degree=3, heads="fewer", bias="all", qk_norm="full", zero_centered=False, widths=(8, None), rope=("half", 1.0),
    causal=True, masking="none", dtype=torch.float64,
)  # fmt: skip


MUTANTS = {  # and the kinds of error that tell of each
    "kv_copies_not_summed": {"parameter gradients", "gradient norm", "copies"},
    "input_gradient_not_summed": {"input gradient"},
    "input_gradient_summed_twice": {"input gradient"},
    "output_not_summed": {"output"},
    "output_bias_on_every_rank": {"output"},
    "statistic_gradient_not_summed": {"input gradient", "parameter gradients"},
    "statistic_counts_every_copy": {"output", "input gradient", "parameter gradients"},
    "full_norm_gain_not_summed": {"parameter gradients", "copies"},
    "head_norm_gain_not_summed": {"parameter gradients", "copies"},
    "head_norm_gain_summed_at_every_pass": {"parameter gradients"},
    "gradient_norm_counts_every_copy": {"gradient norm", "norm over ranks"},
    "initial_weights_drawn_per_rank": {"initial weights"},
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_mutants_are_caught(mutant, dtype):
    """Each drops or doubles one reduction, or adds a bias twice; a matrix that stays green would be blind to it."""
    norm = "head" if mutant.startswith("head_norm") else "full"
    failures = run(3, failures_case, MUTANT_CASE | {"qk_norm": norm, "dtype": dtype}, mutant)
    assert failures[0] == failures[1] == failures[2]
    assert set(failures[0]) >= MUTANTS[mutant], failures[0]


def test_without_a_mutant_the_same_case_passes():
    for norm in ("head", "full"):
        run(3, check_case, MUTANT_CASE | {"qk_norm": norm})
