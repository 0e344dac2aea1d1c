"""The parity matrix of all attention types and of the settings that any type can have, and mutants that it must catch."""

import pytest
import torch

from tests.attention.family import HEADS, LATENT, TYPES, check_case, failures_case
from tests.covering import pairwise
from tests.world import run

FACTORS = {
    "type": list(TYPES),
    "degree": [2, 3, 4],
    "heads": ["multiple", "fewer", "one", "odd", "mha"],
    "bias": ["none", "qkv", "all"],
    "gate": ["none", "elementwise", "headwise"],
    "norm": ["none", "head", "full"],  # of queries and keys; of the latents, where there are some
    "zero_centered": [False, True],
    "widths": [(8, None), (6, 10), (8, 4)],
    "rope": [("half", 1.0), ("interleaved", 1.0), ("half", 0.5), ("half", 0.0)],
    "query_latent": [None, 10],
    "down": ["sharded", "replicated"],
    "extra": ["none", "window", "sinks", "window+sinks", "soft_cap+sinks", "dropout", "dropout+soft_cap+window"],
    "causal": [True, False],
    "masking": ["none", "padding", "documents", "both"],
    "output": [True, False],
    "dtype": [torch.float64, torch.float32],
}


def legal(case: dict) -> bool:
    kind = case["type"]
    if kind in LATENT:
        if case["bias"] == "qkv" or case["zero_centered"] or case["widths"] != (8, None) or case["rope"][1] == 0.5:
            return False
    elif case["query_latent"] or case["down"] == "replicated":
        return False
    if kind == "gta" and (case["norm"] != "none" or case["zero_centered"] or case["widths"] == (6, 10)):
        return False
    if kind == "cross" and ("window" in case["extra"] or case["causal"] or case["masking"] in ("documents", "both")):
        return False
    if case["bias"] == "all" and not case["output"]:
        return False
    return case["rope"][1] != 0.5 or case["widths"][0] == 8


# The grouped type has all pairs to itself: a factor may mean another thing elsewhere (norms of queries or of latents).
CASES = pairwise(FACTORS | {"type": ["gqa"]}, legal)
CASES += pairwise(FACTORS | {"type": [kind for kind in TYPES if kind != "gqa"]}, legal)
EIGHT = dict(
    degree=8, bias="all", gate="elementwise", norm="full", zero_centered=False, widths=(8, None), rope=("half", 1.0),
    query_latent=None, down="sharded", extra="none", causal=True, masking="none", output=True, dtype=torch.float64,
)  # fmt: skip
CASES += [EIGHT | {"type": "gqa", "heads": heads} for heads in ((8, 8), (12, 3), (9, 1))]
CASES += [EIGHT | {"type": kind, "heads": (8, 2)} for kind in TYPES if kind != "gqa"]


def name_of(case: dict) -> str:
    heads = case["heads"] if isinstance(case["heads"], str) else "x".join(map(str, case["heads"]))
    parts = [f"tp{case['degree']}", case["type"], heads, case["gate"], case["norm"], case["extra"], case["masking"]]
    return "-".join([*parts, str(case["dtype"])[6:]])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_sharded_layer_equals_one_process(case):
    run(case["degree"], check_case, case)


def test_covering_set_is_small_and_whole():
    assert len(CASES) <= 150
    assert {(case["degree"], case["heads"]) for case in CASES} >= {(d, heads) for d in (2, 3, 4) for heads in HEADS[2]}
    assert {(case["degree"], case["type"]) for case in CASES} >= {(d, kind) for d in (2, 3, 4, 8) for kind in TYPES}


PLAIN = EIGHT | dict(degree=3, type="gqa", heads="fewer", gate="none")
LATENTS = PLAIN | dict(type="mla", query_latent=10, gate="headwise", widths=(8, None))
MUTANTS = [  # (mutant, a case that it touches, the kinds of error that tell of it)
    ("kv_copies_not_summed", {}, {"parameter gradients", "gradient norm", "copies"}),
    ("kv_copies_not_summed", {"type": "gla", "gate": "headwise"}, {"parameter gradients", "copies"}),
    ("kv_copies_not_summed", {"type": "gta", "norm": "none"}, {"parameter gradients", "copies"}),
    ("input_gradient_not_summed", {}, {"input gradient"}),
    ("input_gradient_not_summed", {"type": "cross"}, {"input gradient"}),
    ("input_gradient_summed_twice", {}, {"input gradient"}),
    ("output_not_summed", {}, {"output"}),
    ("output_bias_on_every_rank", {}, {"output"}),
    ("statistic_gradient_not_summed", {}, {"input gradient", "parameter gradients"}),
    ("statistic_counts_every_copy", {}, {"output", "input gradient", "parameter gradients"}),
    ("head_gain_not_summed", {}, {"parameter gradients", "copies"}),
    ("head_gain_not_summed", {"type": "gla"}, {"parameter gradients", "copies"}),
    ("norm_gain_not_summed", {"norm": "head"}, {"parameter gradients", "copies"}),
    ("norm_gain_not_summed", LATENTS, {"parameter gradients", "copies"}),
    ("norm_gain_summed_at_every_pass", {"norm": "head"}, {"parameter gradients"}),
    ("gradient_norm_counts_every_copy", {}, {"gradient norm", "norm over ranks"}),
    ("initial_weights_drawn_per_rank", {}, {"initial weights"}),
    ("rope_key_gradient_not_summed", LATENTS, {"parameter gradients"}),
    ("rope_key_gradient_not_summed", LATENTS | {"down": "replicated"}, {"parameter gradients"}),
    ("rope_key_gradient_summed_twice", LATENTS, {"parameter gradients"}),
    ("rope_key_gradient_summed_twice", LATENTS | {"down": "replicated"}, {"parameter gradients"}),
    ("latent_gradient_not_summed", LATENTS, {"parameter gradients"}),
    ("latent_gradient_not_summed", LATENTS | {"down": "replicated"}, {"parameter gradients"}),
    ("latent_gradient_not_summed", {"type": "gla", "query_latent": 10}, {"parameter gradients"}),
    ("gate_reads_input_past_its_copy", {"gate": "elementwise"}, {"input gradient"}),
    ("gate_reads_input_past_its_copy", LATENTS, {"input gradient"}),
    ("gate_reads_input_past_its_copy", LATENTS | {"down": "replicated"}, {"input gradient"}),
    ("gate_cut_by_kv_group", {"gate": "headwise"}, {"output"}),
    ("dropout_masks_by_local_head", {"extra": "dropout"}, {"output"}),
]


@pytest.mark.parametrize("mutant, case, kinds", MUTANTS, ids=[f"{name}-{case.get('type', 'gqa')}" for name, case, _ in MUTANTS])
def test_mutants_are_caught(mutant, case, kinds):
    """Each drops or doubles one reduction, or adds a bias twice; a matrix that stays green would be blind to it."""
    failures = run(3, failures_case, PLAIN | case, mutant)
    assert failures[0] == failures[1] == failures[2]
    assert set(failures[0]) >= kinds, failures[0]


def test_without_a_mutant_the_same_cases_pass():
    cases = {repr(case): case for _, case, _ in MUTANTS}
    for case in cases.values():
        run(3, check_case, PLAIN | case)
