"""Configs and names: both ways, old and new keys, what export writes as transformers reads it, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch

from parallel_attn import DecoderLM, GroupedQueryAttention, ModelConfig, MultiHeadLatentAttention, SettingsError
from parallel_attn.attention import GroupedConfig, LatentConfig
from parallel_attn.interop import Architecture, from_hugging_face, to_hugging_face
from parallel_attn.models import MlpConfig
from parallel_attn.nn import RopeConfig, RopeScaling, Rotary
from tests.interop.models import DEEPSEEK, QWEN3_NEXT, SIZES, our_model, their_config, their_model
from tests.interop.test_parity import CASES

LLAMA = {"model_type": "llama", **SIZES, "num_attention_heads": 6, "num_key_value_heads": 2}
V3 = {"model_type": "deepseek_v3", **DEEPSEEK, "q_lora_rank": None}
MODEL = ModelConfig(48, 2, 6, MlpConfig(37), vocab_size=101, norm_eps=1e-5)


def grouped(**settings) -> Architecture:
    return Architecture(MODEL, GroupedQueryAttention, GroupedConfig(num_heads=6, num_kv_heads=2, **settings))


def latent(**settings) -> Architecture:
    return Architecture(MODEL, MultiHeadLatentAttention, LatentConfig(num_heads=6, **settings))


OURS = {  # what transformers has to express, and as which type ("-as-": the type is asked for)
    "plain": (grouped(), "llama"),
    "all-biases-wide-heads": (grouped(bias="all", head_dim=10), "llama"),
    "qkv-biases": (grouped(bias="qkv", window=5), "qwen2"),
    "head-norms-stored-1-plus-w": (grouped(qk_norm="head", qk_norm_zero_centered=True, head_dim=12), "qwen3"),
    "gate": (grouped(qk_norm="head", gate="elementwise", head_dim=16, rope={"fraction": 0.25}), "qwen3_next"),
    "gate-as-qwen3.5": (grouped(qk_norm="head", gate="elementwise", bias="all", head_dim=16), "qwen3_5_text"),
    "latent-by-default": (latent(rope={"style": "interleaved"}), "deepseek_v3"),
    "latent-as-v2": (latent(q_lora_rank=9, bias="all", rope={"style": "interleaved", "theta": 50.0}), "deepseek_v2"),
    "latent-half-and-scaled": (
        latent(q_lora_rank=12, rope={"scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
               "mscale": 0.7, "mscale_all_dim": 1.2}}), "deepseek_v3",
    ),
    "residual-norms-stored-1-plus-w": (
        Architecture(replace(MODEL, norm_zero_centered=True, tie_embeddings=True), GroupedQueryAttention,
                     GroupedConfig(num_heads=6, rope={"theta": 500.0, "scaling": {"type": "linear", "factor": 2.0}})),
        "llama",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OURS)
def test_an_export_loads_in_transformers_and_gives_our_logits(case, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture, wanted = OURS[case]
    named = wanted if "-as-" in case else None
    translation = to_hugging_face(architecture, max_position_embeddings=64, model_type=named)
    assert translation.kind == wanted
    ours = DecoderLM(architecture.model, architecture.attention_class, architecture.attention, dtype=torch.float64)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    assert set(translation.our_shapes) == {name for name, _ in ours.named_parameters()}
    tensors = dict(translation.to_theirs({name: p.detach() for name, p in ours.named_parameters()}))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == translation.their_shapes
    config = AutoConfig.for_model(**translation.config)
    config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    result = theirs.load_state_dict(tensors, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}
    theirs.tie_weights()
    tokens = torch.randint(0, 101, (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5 * ours(tokens).abs().max())
    # And back, from the folder's config: the same function, its gains as transformers stores them.
    again = from_hugging_face(config.to_dict())
    back = our_model(again, tensors, None, torch.float64)
    torch.testing.assert_close(back(tokens), ours(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_config_goes_through_both_directions_unchanged(case):
    model_type, settings = CASES[case]
    first = from_hugging_face(their_config(model_type, **settings).to_dict())
    second = to_hugging_face(first.architecture, max_position_embeddings=128, model_type=model_type)
    assert from_hugging_face(second.config).architecture == first.architecture
    assert second.their_shapes == first.their_shapes
    theirs = their_config(model_type, **settings).to_dict()
    for key in set(second.config) & set(theirs) - {"architectures", "rope_parameters", "max_window_layers"}:
        if key not in ("mlp_only_layers", "num_experts", "num_nextn_predict_layers", "sliding_window"):
            assert second.config[key] == theirs[key], key


def test_tensors_go_through_both_directions_bitwise():
    for model_type, settings in (CASES["qwen3-next-bias-one-kv-head"], CASES["deepseek-v2-query-latent-bias"]):
        config = their_config(model_type, **settings)
        tensors = dict(their_model(config, torch.float32).state_dict())
        translation = from_hugging_face(config.to_dict())
        ours = dict(translation.to_ours(tensors))
        assert {name: tuple(t.shape) for name, t in ours.items()} == translation.our_shapes
        back = dict(translation.to_theirs(ours))
        assert set(back) == set(tensors) and all(torch.equal(back[name], tensors[name]) for name in back)


ROPES = {
    "old": ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear", 500.0)),
    "new": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}, ("linear", 500.0)),
    "both": (
        {"rope_theta": 500, "rope_scaling": {"rope_type": "linear", "factor": 2},
         "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}, ("linear", 500.0),
    ),
    "by-layer-type": ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, (None, 7.0)),
    "none": ({}, (None, 10000.0)),
    "null": ({"rope_scaling": None, "rope_theta": 20.0}, (None, 20.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", ROPES)
def test_rope_under_old_and_new_keys(case):
    keys, (kind, theta) = ROPES[case]
    rope = from_hugging_face({**LLAMA, **keys}).architecture.attention.rope
    assert rope == RopeConfig(theta=theta, scaling=kind and RopeScaling(kind, 2.0))
    if case != "by-layer-type":  # (which transformers' llama does not have): as transformers itself reads the keys
        normalized = their_config(**LLAMA, **keys).to_dict()
        assert from_hugging_face(normalized).architecture.attention.rope == rope


def test_lengths_and_multipliers_of_yarn_as_transformers_takes_them():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    def scaling(**keys):
        config = {**V3, "max_position_embeddings": 64, **copy.deepcopy(keys)}
        rope = from_hugging_face(config).architecture.attention.rope
        theirs = their_config(**copy.deepcopy(config))
        wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
        rotary = Rotary(V3["qk_rope_head_dim"], theta=rope.theta, style=rope.style, scaling=rope.scaling)
        torch.testing.assert_close(rotary.frequencies(torch.device("cpu")).float(), wanted)
        assert rope.scaling.cos_sin_factor == pytest.approx(factor)
        assert rotary.score_factor == pytest.approx(yarn_apply_mscale(theirs.rope_parameters, 1.0))
        return rope.scaling

    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert scaling(rope_scaling=yarn) == RopeScaling("yarn", 4.0, 16)
    assert scaling(rope_scaling={**yarn, "factor": None}) == RopeScaling("yarn", 4.0, 16)
    assert scaling(rope_scaling={"type": "yarn", "factor": 4.0}) == RopeScaling("yarn", 4.0, 64)
    assert (
        scaling(
            rope_scaling={"type": "yarn", "factor": 4.0}, original_max_position_embeddings=8
        ).original_max_position_embeddings
        == 8
    )
    assert scaling(rope_scaling={**yarn, "mscale": 0.7}) == RopeScaling("yarn", 4.0, 16)  # not read without the other
    assert scaling(rope_scaling={**yarn, "mscale": 0.7, "mscale_all_dim": 0}) == RopeScaling("yarn", 4.0, 16)
    both = scaling(rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.5})
    assert both == RopeScaling("yarn", 4.0, 16, mscale_all_dim=1.0, attention_factor=1.5)
    llama = from_hugging_face({**LLAMA, "rope_scaling": {**yarn, "mscale_all_dim": 1.0}}).architecture.attention
    assert llama.rope.scaling == RopeScaling("yarn", 4.0, 16)  # nor the other without mscale, but by DeepSeek


NEXT = {"model_type": "qwen3_next", **QWEN3_NEXT, "num_experts": 0}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
REFUSED = [
    ({**LLAMA, "model_type": "olmo2"}, "model_type=olmo2: cannot be expressed, its norms stand behind"),
    ({"model_type": "qwen3_5"}, "vision tower; take its text_config"),
    ({**LLAMA, "model_type": "gpt2"}, "model_type=gpt2: cannot be expressed, only deepseek_v2, deepseek_v3, llama"),
    ({}, "no model_type"),
    ({**LLAMA, "mlp_bias": True}, "mlp_bias=true: the MLP here has no biases, only false"),
    ({**LLAMA, "hidden_act": "gelu"}, "hidden_act=gelu: cannot be expressed, only silu"),
    ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config=.*quantized weights"),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: transformers' llama turns whole heads"),
    ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type=dynamic is not one of: linear, yarn, llama3"),
    (
        {**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
        "rope_theta is 10000.0 in the top of config.json and 500000.0 in rope_parameters",
    ),
    ({**LLAMA, "num_attention_heads": 7}, "num_attention_heads=7: it does not divide hidden_size=48"),
    ({**LLAMA, "model_type": ["llama"]}, "no model_type"),
    ({**LLAMA, "rms_norm_eps": "1e-5"}, "rms_norm_eps=1e-5 must be a number"),
    ({**LLAMA, "rope_theta": "x"}, "rope_theta=x must be a number"),
    ({**LLAMA, "tie_word_embeddings": "false"}, "tie_word_embeddings=false must be true or false"),
    ({**LLAMA, "attention_bias": 1}, "attention_bias=1 must be true or false"),
    ({**QWEN2, "layer_types": "full_attention"}, "layer_types=full_attention must be a list of names"),
    ({**LLAMA, "vocab_size": 0}, "vocab_size=0 must be a whole number, at least 1"),
    ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size is missing, a llama model needs it"),
    ({k: v for k, v in QWEN2.items() if k != "num_key_value_heads"}, "num_key_value_heads is missing"),
    (
        {**QWEN2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "layer_types=null: layers of .'full_attention', 'sliding_attention'. cannot be expressed",
    ),
    ({**NEXT, "layer_types": None}, "layers of .'linear_attention'. cannot be expressed"),
    ({**NEXT, "num_experts": 8, "mlp_only_layers": [0]}, "num_experts=8: layers with experts"),
    ({**V3, "first_k_dense_replace": 1}, "first_k_dense_replace=1: layers with experts .*only all 2 dense"),
    ({**V3, "num_key_value_heads": 2}, "num_key_value_heads=2: latent attention has as many as query heads, 6"),
]  # fmt: skip


@pytest.mark.parametrize("config, message", REFUSED, ids=[message[:34] for _, message in REFUSED])
def test_a_config_that_cannot_be_expressed_here(config, message):
    with pytest.raises(SettingsError, match=message) as error:
        from_hugging_face(config)
    assert "\n" not in str(error.value)


UNWRITABLE = [
    (grouped(gate="headwise", qk_norm="head"), "attention.gate=headwise cannot be expressed as qwen3_next, only elem"),
    (grouped(qk_norm="full"), "attention.qk_norm=full cannot be expressed as qwen3, only head"),
    (grouped(soft_cap=30.0), "attention.soft_cap=30.0 cannot be expressed as llama, only null"),
    (grouped(sinks=True), "attention.sinks=true cannot be expressed as llama, only false"),
    (grouped(window=4), "attention.window=4 cannot be expressed as llama, only null"),
    (grouped(v_head_dim=4), "attention.v_head_dim=4 cannot be expressed as llama, only null or 8"),
    (grouped(rope=RopeConfig(style="interleaved")), "rope.style=interleaved cannot be expressed as llama, only half"),
    (grouped(rope=RopeConfig(fraction=0.5)), "attention.rope.fraction=0.5 cannot be expressed as llama, only 1.0"),
    (grouped(output_projection=False), "attention.output_projection=false cannot be expressed"),
    (grouped(bias="qkv", head_dim=10), "attention.head_dim=10 cannot be expressed as qwen2"),
    (latent(qk_rope_head_dim=0), "attention.qk_rope_head_dim=0 cannot be expressed as deepseek_v3"),
    (latent(latent_norm=False), "attention.latent_norm=false cannot be expressed as deepseek_v3, only true"),
    (latent(gate="headwise"), "attention.gate=headwise cannot be expressed as deepseek_v3, only none"),
    (latent(latent_norm_eps=1e-5), "attention.latent_norm_eps=1e-05 cannot be expressed"),
    (replace(grouped(), model=replace(MODEL, vocab_size=None)), "model.vocab_size=null"),
]  # fmt: skip


@pytest.mark.parametrize("architecture, message", UNWRITABLE, ids=[message[:40] for _, message in UNWRITABLE])
def test_a_model_that_transformers_cannot_express(architecture, message):
    with pytest.raises(SettingsError, match=message) as error:
        to_hugging_face(architecture, max_position_embeddings=64)
    assert "\n" not in str(error.value)


def test_a_type_of_attention_that_transformers_does_not_have():
    class Stranger(GroupedQueryAttention):
        pass

    with pytest.raises(
        SettingsError, match="Stranger has no model type in transformers, only: GroupedQueryAttention, Multi"
    ):
        to_hugging_face(replace(grouped(), attention_class=Stranger), max_position_embeddings=64)
    with pytest.raises(
        SettingsError, match="model_type=deepseek_v2 cannot express GroupedQueryAttention, only: llama, qwen2"
    ):
        to_hugging_face(grouped(), max_position_embeddings=64, model_type="deepseek_v2")


def tensors_of(config: dict) -> tuple:
    translation = from_hugging_face(config)
    return translation, {name: torch.randn(shape) for name, shape in translation.their_shapes.items()}


def test_names_that_are_missing_or_extra():
    translation, tensors = tensors_of(LLAMA)
    q = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(SettingsError, match=f"tensor {q} is missing: "):
        dict(translation.to_ours({name: t for name, t in tensors.items() if name != q}))
    with pytest.raises(SettingsError, match="tensor model.layers.0.self_attn.k_proj.weight is missing .and 1 more."):
        translation.check_names(name for name in tensors if "k_proj" not in name)
    with pytest.raises(
        SettingsError, match="tensor model.layers.0.self_attn.q_proj.bias has no place in a llama model"
    ):
        translation.check_names([*tensors, "model.layers.0.self_attn.q_proj.bias"])
    with pytest.raises(SettingsError, match="lm_head.weight is missing"):  # not tied
        translation.check_names(name for name in tensors if name != "lm_head.weight")
    with pytest.raises(SettingsError, match=r"q_proj.weight has the shape \(3, 48\), its config.json says \(48, 48\)"):
        dict(translation.to_ours({**tensors, q: torch.ones(3, 48)}))
    translation.check_names([*tensors, "model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.norm.weight"])


def test_the_layer_of_multi_token_prediction_is_left_aside_only_where_the_config_has_one():
    extra = "model.layers.2.eh_proj.weight"
    for layers, fits in ((1, True), (0, False)):
        translation, tensors = tensors_of({**V3, "num_nextn_predict_layers": layers})
        if fits:
            translation.check_names([*tensors, extra])
            continue
        with pytest.raises(SettingsError, match=f"tensor {extra} has no place"):
            translation.check_names([*tensors, extra])


def test_tied_embeddings_under_either_name_or_both():
    translation, tensors = tensors_of({**LLAMA, "tie_word_embeddings": True})
    table = tensors.pop("model.embed_tokens.weight")
    for given in (
        {"model.embed_tokens.weight": table},
        {"lm_head.weight": table},
        {"lm_head.weight": table, "model.embed_tokens.weight": table.clone()},
    ):
        ours = dict(translation.to_ours({**tensors, **given}))
        assert torch.equal(ours["embedding.weight"], table) and "head.weight" not in ours
    with pytest.raises(SettingsError, match="tie_word_embeddings=true, but .* differ: set it to false"):
        dict(translation.to_ours({**tensors, "model.embed_tokens.weight": table, "lm_head.weight": table + 1}))
    with pytest.raises(SettingsError, match="model.embed_tokens.weight is missing"):
        translation.check_names(tensors)
    with pytest.raises(SettingsError, match=r"lm_head.weight has the shape \(102, 48\)"):
        dict(translation.to_ours({**tensors, "lm_head.weight": torch.ones(102, 48)}))
