"""What a type cannot honour is refused by name, in one line, before anything is drawn or sent."""

from dataclasses import fields

import pytest
from omegaconf import OmegaConf

from parallel_attn import (
    AxisGroup,
    CrossAttention,
    GroupedLatentAttention,
    GroupedQueryAttention,
    GroupedTiedAttention,
    MultiHeadLatentAttention,
    SettingsError,
)
from parallel_attn.training.config import parse
from parallel_attn.training.pretrain import build_model, with_vocabulary
from tests.training.composed import composed

MLA, GLA, GTA, GQA = MultiHeadLatentAttention, GroupedLatentAttention, GroupedTiedAttention, GroupedQueryAttention


@pytest.mark.parametrize(
    "make, settings, message",
    [
        (MLA, {"qk_rope_head_dim": 7}, "attention.qk_rope_head_dim=7 must be even"),
        (MLA, {"qk_rope_head_dim": -2}, "attention.qk_rope_head_dim=-2 must be even"),
        (MLA, {"qk_rope_head_dim": 0, "qk_nope_head_dim": 0}, "attention.qk_nope_head_dim=0 must be at least 1"),
        (MLA, {"kv_lora_rank": 0}, "attention.kv_lora_rank=0 must be at least 1"),
        (MLA, {"q_lora_rank": 0}, "attention.q_lora_rank=0 must be at least 1, or null"),
        (MLA, {"q_lora_rank": 2.5}, "attention.q_lora_rank=2.5 must be a whole number"),
        (MLA, {"v_head_dim": 0}, "attention.v_head_dim=0 must be at least 1"),
        (MLA, {"num_heads": 0}, "attention.num_heads=0 must be at least 1"),
        (GTA, {"num_heads": 5}, "attention.num_heads=5 does not divide model.hidden_size=24: set attention.head_dim"),
        (MLA, {"head_dim": 8}, "attention.head_dim=8: MultiHeadLatentAttention has the widths attention.qk_nope_head_dim"),
        (MLA, {"qk_norm": "head"}, "attention.qk_norm=head: MultiHeadLatentAttention norms its latents instead"),
        (MLA, {"rope": {"fraction": 0.5}}, "attention.rope.fraction=0.5: MultiHeadLatentAttention"),
        (MLA, {"bias": "qkv"}, "attention.bias=qkv is not one of: none, all"),
        (MLA, {"down_projection": "split"}, "attention.down_projection=split is not one of: auto, sharded, replicated"),
        (MLA, {"qk_rope_head_dim": 0, "rope": {"scaling": {"type": "linear", "factor": 2.0}}}, "nothing to scale"),
        (GLA, {"num_latent_heads": 3}, "attention.num_latent_heads=3 does not divide attention.num_heads=4: use one of 1, 2, 4"),
        (GLA, {"num_latent_heads": 0}, "attention.num_latent_heads=0 does not divide"),
        (GTA, {"head_dim": 10, "rope": {"fraction": 0.1}}, "attention.rope.fraction=0.1 of .*head_dim=10 is a rope key of width 1"),
        (GTA, {"rope": {"fraction": 1.5}}, "attention.rope.fraction=1.5"),
        (GTA, {"v_head_dim": 4}, "attention.v_head_dim=4: GroupedTiedAttention has the same vectors"),
        (GTA, {"qk_norm": "full"}, "attention.qk_norm=full: GroupedTiedAttention would norm its values"),
        (CrossAttention, {"window": 4}, "attention.window=4: CrossAttention has no order"),
        (CrossAttention, {"causal": True}, "attention.causal=true: CrossAttention has no order"),
        (CrossAttention, {"rope": {"fraction": 1.0}}, "attention.rope.fraction=1.0: CrossAttention has no order"),
        (CrossAttention, {"rope": {"theta": 7.0}}, "attention.rope.theta=7.0: CrossAttention has no order"),
        (MLA, {"latent_norm_eps": -1.0}, "attention.latent_norm_eps=-1.0 must be positive and finite"),
        (MLA, {"latent_norm": False, "latent_norm_eps": 1e-5}, "attention.latent_norm_eps=1e-05: .* with attention.latent_norm=false"),
        (GLA, {"down_projection": "replicated"}, "attention.down_projection=replicated: .* without attention.q_lora_rank"),
        (GQA, {"rope": {"scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}}},
         "attention.rope.scaling.mscale_all_dim=1.0: GroupedQueryAttention reads it beside mscale only"),
        (GQA, {"sinks": "false"}, "attention.sinks='false' must be true or false"),
        (GQA, {"bias": True}, "attention.bias=True must be a word"),
        (GQA, {"num_heads": 4.0}, "attention.num_heads=4.0 must be a whole number"),
        (GQA, {"gate": "sometimes"}, "attention.gate=sometimes is not one of: none, elementwise, headwise"),
        (GQA, {"window": 0}, "attention.window=0 must be at least 1"),
        (GQA, {"window": True}, "attention.window=True must be a whole number"),
        (GQA, {"soft_cap": 0.0}, "attention.soft_cap=0.0 must be positive"),
        (GQA, {"soft_cap": "high"}, "attention.soft_cap='high' must be a number"),
        (GQA, {"bias": "all", "output_projection": False}, "attention.bias=all with attention.output_projection=false"),
        (GQA, {"qk_norm_zero_centered": True}, "attention.qk_norm_zero_centered=true needs attention.qk_norm"),
        (GQA, {"q_lora_rank": 4}, "attention.q_lora_rank is not a setting of GroupedQueryAttention"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:40],
)  # fmt: skip
def test_a_layer_refuses(make, settings, message):
    with pytest.raises(SettingsError, match=message) as caught:
        make(24, **{"num_heads": 4} | settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["attention=cross"], "CrossAttention reads an encoder's states: use model=encoder_decoder"),
        (["attention=mla", "attention.qk_rope_head_dim=7"], "attention.qk_rope_head_dim=7 must be even"),
        (["attention=mla", "attention.qk_norm=head"], "attention.qk_norm=head: MultiHeadLatentAttention"),
        (["attention.output_projection=false", "attention.v_head_dim=8"], "gives 64 = heads x v_head_dim where model.hidden_size=128"),
        (["attention.causal=false"], "attention.causal=false: a decoder language model would see its targets"),
        (["attention=mla", "parallel.tensor=9"], "parallel.tensor=9 exceeds attention.num_heads=8"),
        (["attention=gla", "attention.num_latent_heads=3"], "attention.num_latent_heads=3 does not divide"),
        (["attention.rope.scaling={type:yarn,factor:4}"], "attention.rope.scaling.original_max_position_embeddings"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_configuration_is_refused_on_paper(overrides, message):
    with pytest.raises(SettingsError, match=message):
        config = with_vocabulary(parse(composed(*overrides)), 257)
        build_model(config, AxisGroup(None, 0, config.parallel.tensor), "meta")


CHOICES = ("mha", "mqa", "gqa", "gated_gqa", "qwen3_5", "mla", "gla", "gta", "cross")


@pytest.mark.parametrize("choice", CHOICES)
def test_every_key_of_a_type_stands_in_its_yaml(choice):
    raw = composed(f"attention={choice}")
    config = parse(raw).attention
    keys = set(OmegaConf.to_container(raw.attention)) - {"_target_"}
    assert keys == {field.name for field in fields(config.cls.Config)}


def test_the_qwen3_5_preset():
    """8 query heads and 2 KV heads of 256, rotary on 64 dims, zero-centred norms per head before it, elementwise gate."""
    config = parse(composed("attention=qwen3_5", "train.precision=fp32"))
    layer = config.attention.cls(2048, config.attention.config, name="a", device="meta")
    assert (layer.plan.num_heads, layer.plan.num_kv_heads, layer.head_dim, layer.rotary.width) == (8, 2, 256, 64)
    assert layer.gate.weight.shape == (8 * 256, 2048) and layer.q_norm.zero_centered and layer.q_norm.width == 256


def test_the_gated_preset_and_mla_without_positions_build():
    for overrides in (["attention=gated_gqa", "attention.gate=headwise"], ["attention=mla", "attention.qk_rope_head_dim=0"]):
        config = with_vocabulary(parse(composed(*overrides)), 257)
        build_model(config, AxisGroup(None, 0, 4), "meta")
