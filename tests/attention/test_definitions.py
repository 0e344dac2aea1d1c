"""The declarations of built layers against published numbers (Zadouri, Strauss, Dao 2025, tables 1, 23 and 26, and
DeepSeek-V2, table 1; where the papers stop, counted from the definitions)."""

import pytest

from parallel_attn import (
    AxisGroup,
    GroupedLatentAttention,
    GroupedQueryAttention,
    GroupedTiedAttention,
    MultiHeadLatentAttention,
)
from parallel_attn.costs import full_parameters, local_parameters

# The paper's XL: width 2048, 16 heads of 128; latents of 512 (MLA) and 256 (GLA), query latent 1024, rope key 64.
LATENT = dict(num_heads=16, q_lora_rank=1024, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
              latent_norm=False, down_projection="replicated")  # fmt: skip
GROUPED = dict(num_heads=16, head_dim=128)
XL = {
    "mha": (GroupedQueryAttention, GROUPED | {"num_kv_heads": 16}),
    "mqa": (GroupedQueryAttention, GROUPED | {"num_kv_heads": 1}),
    "gqa-4": (GroupedQueryAttention, GROUPED | {"num_kv_heads": 4}),
    "gqa-2": (GroupedQueryAttention, GROUPED | {"num_kv_heads": 2}),
    "gqa-4 elementwise gate": (GroupedQueryAttention, GROUPED | {"num_kv_heads": 4, "gate": "elementwise"}),
    "gqa-4 headwise gate": (GroupedQueryAttention, GROUPED | {"num_kv_heads": 4, "gate": "headwise"}),
    "mla": (MultiHeadLatentAttention, LATENT | {"kv_lora_rank": 512}),
    "gla-2": (GroupedLatentAttention, LATENT | {"kv_lora_rank": 256, "num_latent_heads": 2}),
    "gla-4": (GroupedLatentAttention, LATENT | {"kv_lora_rank": 256, "num_latent_heads": 4}),
    "gta-4": (GroupedTiedAttention, GROUPED | {"num_kv_heads": 4}),
}
CACHE_BYTES = {  # per token and layer on each rank, bf16, at degrees 1, 2, 4, 8
    "mha": (8192, 4096, 2048, 1024),
    "gqa-4": (2048, 1024, 512, 512),
    "gqa-2": (1024, 512, 512, 512),
    "mqa": (512, 512, 512, 512),
    "mla": (1152, 1152, 1152, 1152),
    "gla-2": (1152, 640, 640, 640),
    "gla-4": (2176, 1152, 640, 640),
    "gta-4": (1152, 640, 384, 384),
}
MILLIONS = {  # parameters of a layer on each rank
    "mha": (16.78, 8.39, 4.19, 2.10),
    "gqa-4": (10.49, 5.24, 2.62, 1.57),
    "gqa-4 elementwise gate": (14.68, 7.34, 3.67, 2.10),
    "gqa-4 headwise gate": (10.52, 5.26, 2.63, 1.58),
    "mqa": (8.91, 4.72, 2.62, 1.57),
    "mla": (12.71, 8.00, 5.64, 4.46),
    "gla-2": (11.67, 6.95, 4.85, 3.80),
    "gta-4": (9.57, 4.85, 2.49, 1.44),
}


def on_paper(name: str, degree: int):
    make, settings = XL[name]
    return make(2048, tensor_parallel=AxisGroup(None, 0, degree), device="meta", name="a", **settings)


@pytest.mark.parametrize("name", CACHE_BYTES)
def test_cache_bytes_of_each_rank(name):
    for degree, wanted in zip((1, 2, 4, 8), CACHE_BYTES[name]):
        layer = on_paper(name, degree)
        assert {2 * layer.cache_elements_per_token(rank) for rank in range(degree)} == {wanted}, degree


@pytest.mark.parametrize("name", MILLIONS)
def test_parameters_of_each_rank(name):
    for degree, wanted in zip((1, 2, 4, 8), MILLIONS[name]):
        layer = on_paper(name, degree)
        held = {round(local_parameters(layer, rank) / 1e6, 2) for rank in range(degree)}
        assert held == {wanted}, degree
        assert round(full_parameters(layer) / 1e6, 2) == MILLIONS[name][0], "the full count depends on the degree"


def test_down_projections_split_over_the_ranks_leave_nothing_replicated():
    """With the default form a rank holds an eighth, up to rounding."""
    make, settings = XL["mla"]
    layer = make(2048, tensor_parallel=AxisGroup(None, 0, 8), device="meta", name="a", **settings | {"down_projection": "auto"})
    assert round(local_parameters(layer) / 1e6, 2) == 1.59


@pytest.mark.parametrize(
    "make, settings, elements",
    [
        (GroupedQueryAttention, {"num_kv_heads": 8}, 512),
        (GroupedQueryAttention, {"num_kv_heads": 1}, 64),
        (GroupedQueryAttention, {"num_kv_heads": 4}, 256),
        (MultiHeadLatentAttention, {"kv_lora_rank": 64, "qk_rope_head_dim": 26}, 90),
    ],
)
def test_elements_cached_per_token_at_width_256_with_8_heads(make, settings, elements):
    assert make(256, num_heads=8, name="a", device="meta", **settings).cache_elements_per_token() == elements


def test_core_flops_of_decode_at_32k():
    """2 h (E + Ev) L, in units of 1e9: 0.268 for GQA and GTA, 0.336 for MLA with expanded keys and values."""
    for name, wanted in (("gqa-4", 0.268), ("gta-4", 0.268), ("mla", 0.336)):
        assert round(on_paper(name, 1).core_flops_per_token(32 * 1024) / 1e9, 3) == wanted
