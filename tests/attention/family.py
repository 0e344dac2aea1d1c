"""What a rank runs for the parity matrix of all types (test_parity.py), apart from it: ranks need not draw the cases."""

import torch

from parallel_attn import (
    CrossAttention,
    GroupedLatentAttention,
    GroupedQueryAttention,
    GroupedTiedAttention,
    MultiHeadLatentAttention,
)
from parallel_attn.planning import Parity, mutants
from parallel_attn.planning.parity import BOUNDS
from tests.parity import check, compare, world_axis

TYPES = {
    "gqa": GroupedQueryAttention,
    "cross": CrossAttention,
    "mla": MultiHeadLatentAttention,
    "gla": GroupedLatentAttention,
    "gta": GroupedTiedAttention,
}
LATENT = ("mla", "gla")
SHARED_HEADS = {"gqa": "num_kv_heads", "cross": "num_kv_heads", "gta": "num_kv_heads", "gla": "num_latent_heads"}
HEADS = {  # (query heads, KV / latent / tied heads) by degree: multiple, fewer, one, not dividing
    2: {"multiple": (8, 4), "fewer": (6, 1), "one": (4, 1), "odd": (5, 5), "mha": (4, 4)},
    3: {"multiple": (6, 3), "fewer": (8, 2), "one": (7, 1), "odd": (8, 4), "mha": (7, 7)},
    4: {"multiple": (8, 4), "fewer": (6, 2), "one": (8, 1), "odd": (18, 6), "mha": (6, 6)},
}


def settings_of(case: dict) -> dict:
    heads, shared = HEADS[case["degree"]][case["heads"]] if isinstance(case["heads"], str) else case["heads"]
    kind, extra, (rope_style, rope_fraction) = case["type"], case["extra"], case["rope"]
    settings = dict(num_heads=heads, gate=case["gate"], output_projection=case["output"], bias=case["bias"])
    if kind in SHARED_HEADS:
        settings[SHARED_HEADS[kind]] = shared
    settings["window"] = 4 if "window" in extra else None
    settings["sinks"] = "sinks" in extra
    settings["soft_cap"] = 1.5 if "soft_cap" in extra else None
    settings["dropout"] = 0.3 if "dropout" in extra else 0.0
    if kind != "cross":
        settings["causal"] = case["causal"]
    if kind in LATENT:
        settings |= dict(kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4 if rope_fraction else 0, v_head_dim=5)
        settings["q_lora_rank"] = case["query_latent"]
        if kind == "mla" or case["query_latent"]:
            settings["down_projection"] = case["down"]
        settings |= dict(latent_norm=case["norm"] != "none", rope={"style": rope_style})
        return settings
    settings["head_dim"], v_head_dim = case["widths"]
    if kind != "cross":
        settings["rope"] = {"style": rope_style, "fraction": rope_fraction}
    if kind != "gta":
        settings |= dict(v_head_dim=v_head_dim, qk_norm=case["norm"])
        settings["qk_norm_zero_centered"] = case["zero_centered"] and case["norm"] != "none"
    return settings


def masks_of(case: dict, length: int) -> dict:
    masks = {}
    if case["masking"] in ("padding", "both"):
        masks["key_padding_mask"] = torch.arange(length) < torch.tensor([[6], [9]])
    if case["masking"] in ("documents", "both"):
        masks["document_ids"] = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] + [2] * 6])
    return masks


def parity_case(case: dict, mutant: str | None = None) -> Parity:
    hidden, batch, length = 24, 2, 9
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(batch, length, hidden, generator=generator, dtype=torch.float64).to(case["dtype"])]
    given = {"samples": torch.tensor([3, 11]), "step": 5} if "dropout" in case["extra"] else {}
    extra = {}
    if case["type"] == "cross":
        inputs[0] = inputs[0][:, :7]
        extra["memory_size"] = 14
        inputs.append(torch.randn(batch, length, 14, generator=generator, dtype=torch.float64).to(case["dtype"]))

    def build(axis):
        make = TYPES[case["type"]]
        return make(hidden, tensor_parallel=axis, name="layer", dtype=case["dtype"], **extra, **settings_of(case))

    def forward(layer, inputs):
        return layer(*inputs, **masks_of(case, length), **given)

    applied = mutants.applied(mutant)
    found = compare(build, forward, inputs, mutation=applied)
    assert all(applied.total_hits(world_axis()).values()), f"{mutant} does not touch this case"
    return found


def check_case(case: dict) -> None:
    check(parity_case(case), BOUNDS[case["dtype"]])


def failures_case(case: dict, mutant: str) -> dict[str, str]:
    return parity_case(case, mutant).failures(BOUNDS[case["dtype"]])
