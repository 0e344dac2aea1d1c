"""Scaled rotary frequencies against transformers' functions, the paper's formulas, and settings that cannot work."""

import math

import pytest
import torch

from parallel_attn import GroupedQueryAttention, SettingsError
from parallel_attn.nn import RopeConfig, RopeScaling, Rotary
from parallel_attn.training.config import parse
from tests.training.composed import composed
from tests.widened import Widened

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
CASES = {
    "linear": {"type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn-not-truncated": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn-mscale-of-all-dims-only": {**YARN, "mscale_all_dim": 0.5},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-step": {**YARN, "original_max_position_embeddings": 6},  # both ends of the ramp at dim 0
    "llama3": LLAMA3,
    "llama3-narrow": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5},
}


@pytest.mark.parametrize("fraction, theta", [(1.0, 10000.0), (0.5, 500000.0)])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_as_transformers_computes_them(case, fraction, theta):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, width = CASES[case], 64
    rotary = Rotary(width, theta=theta, fraction=fraction, scaling=scaling)
    parameters = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
    if scaling["type"] == "llama3":
        parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **parameters}
    config = LlamaConfig(
        hidden_size=width, num_attention_heads=1, max_position_embeddings=4096,
        rope_parameters={**parameters, "rope_theta": theta, "partial_rotary_factor": fraction},
    )  # fmt: skip
    got = rotary.frequencies(torch.device("cpu"))
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["type"]](config)
    assert wanted.dtype == torch.float32 and got.dtype == torch.float64
    torch.testing.assert_close(got.float(), wanted, rtol=2e-6, atol=0)
    with Widened():
        wanted, _ = ROPE_INIT_FUNCTIONS[scaling["type"]](config)
    assert wanted.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
    cos, sin = rotary.tables(torch.tensor([5]), torch.float64)
    torch.testing.assert_close(cos.flatten(), (5 * wanted).cos() * factor, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sin.flatten(), (5 * wanted).sin() * factor, rtol=1e-12, atol=1e-12)


def test_the_cases_scale_in_different_ways():
    rows = [Rotary(64, scaling=scaling).frequencies(torch.device("cpu")) for scaling in (None, *CASES.values())]
    distinct = {tuple(row.tolist()) for row in rows}
    assert len(distinct) == len(rows) - 2  # mscale_all_dim alone and attention_factor leave yarn's frequencies alone


def test_factors_by_the_papers_formulas():
    root = 0.1 * math.log(4) + 1  # Peng 2023, section 3.4
    assert RopeScaling(**YARN).cos_sin_factor == root
    assert RopeScaling(**YARN, attention_factor=1.3).cos_sin_factor == 1.3
    deepseek = RopeScaling(**{**YARN, "factor": 40}, mscale=1.0, mscale_all_dim=1.0)  # DeepSeek-V3's config
    assert deepseek.cos_sin_factor == 1.0
    assert deepseek.score_factor == pytest.approx((0.1 * math.log(40) + 1) ** 2) == pytest.approx(1.8738, abs=1e-4)
    assert Rotary(8, scaling=deepseek).score_factor == deepseek.score_factor
    assert Rotary(8).score_factor == Rotary(8, scaling=YARN).score_factor == 1.0


def test_a_factor_of_one_changes_nothing():
    x = torch.randn(1, 300, 2, 32, dtype=torch.float64)
    for kind in ("linear", "yarn", "llama3"):
        length = {} if kind == "linear" else {"original_max_position_embeddings": 64}
        rotary = Rotary(32, scaling={"type": kind, "factor": 1.0, **length})
        torch.testing.assert_close(rotary(x), Rotary(32)(x), rtol=1e-12, atol=1e-12)


def test_without_rotation_the_call_returns_its_input():
    rotary = Rotary(7, fraction=0.0)  # an odd head is fine: nothing is turned
    x = torch.randn(1, 3, 2, 7)
    assert rotary.width == 0 and rotary(x) is x and rotary(x, torch.tensor([4, 5, 6]), offset=3) is x


def test_the_three_ways_to_give_it():
    wanted = RopeScaling(**YARN)
    assert RopeConfig(scaling=dict(YARN)).scaling == RopeConfig(scaling=wanted).scaling == wanted
    layer = GroupedQueryAttention(32, num_heads=4, name="a", rope={"scaling": dict(YARN)})
    assert layer.config.rope.scaling == layer.rotary.scaling == wanted
    config = parse(composed("attention.rope.scaling={type:yarn,factor:4,original_max_position_embeddings:128}"))
    assert config.attention.config.rope.scaling == wanted
    assert parse(composed()).attention.config.rope.scaling is None


BAD = [
    ({"type": "ntk", "factor": 2}, "scaling.type=ntk is not one of: linear, yarn, llama3"),
    ({"factor": 2}, "scaling.type has no value: give linear, yarn, llama3"),
    ({"type": "linear"}, "scaling.factor has no value"),
    ({"type": "linear", "factor": 0.5}, "scaling.factor=0.5 must be at least 1"),
    ({"type": "linear", "factor": "4"}, "scaling.factor='4' must be a number"),
    ({"type": "yarn", "factor": 2}, "original_max_position_embeddings=None: yarn needs"),
    ({"type": "llama3", "factor": 2, "original_max_position_embeddings": 0}, "embeddings=0: llama3 needs"),
    ({"rope_type": "yarn", "factor": 2}, r"scaling has no \['rope_type'\]: type, factor"),
    ({"type": "linear", "factor": 2, "mscale": 0.7}, "mscale=0.7 is not read by .*type=linear, only by: yarn"),
    ({**YARN, "low_freq_factor": 2.0}, "low_freq_factor=2.0 is not read by .*type=yarn, only by: llama3"),
    ({**YARN, "beta_fast": 1.0}, "beta_slow=1.0 must be smaller than attention.rope.scaling.beta_fast=1.0"),
    ({**LLAMA3, "high_freq_factor": 0.5}, "low_freq_factor=1.0 must be smaller than .*high_freq_factor=0.5"),
    ({**YARN, "beta_slow": 0.0}, "beta_slow=0.0 must be above 0"),
    ({**YARN, "mscale": 0.7}, "mscale=0.7 goes unread without mscale_all_dim"),
    ({**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 2.0}, "unread beside attention_factor"),
    ({**YARN, "attention_factor": 0.0}, "attention_factor=0.0 must be above 0"),
    ({**YARN, "truncate": 1.5}, "truncate=1.5 must be true or false"),
    ("yarn", "scaling='yarn' is not a mapping of: type, factor"),
]


@pytest.mark.parametrize("scaling, message", BAD, ids=[message[:30] for _, message in BAD])
def test_settings_that_cannot_work(scaling, message):
    with pytest.raises(SettingsError, match=message) as error:
        GroupedQueryAttention(32, num_heads=4, name="a", rope={"scaling": scaling})
    assert "\n" not in str(error.value)


def test_settings_that_do_not_fit_each_other():
    with pytest.raises(SettingsError, match="theta=0.5 must be above 1 for attention.rope.scaling.type=yarn"):
        Rotary(8, theta=0.5, scaling=YARN)
    with pytest.raises(SettingsError, match="embeddings=1 is too short: no dim turns .*, give at least 7"):
        Rotary(64, scaling={**YARN, "original_max_position_embeddings": 1})
    with pytest.raises(SettingsError, match="scaling.type=yarn has nothing to scale at attention.rope.fraction=0"):
        Rotary(8, fraction=0.0, scaling=YARN)


@pytest.mark.parametrize(
    "override, message",
    [
        ("{type:yarn,factor:4}", "embeddings=None: yarn needs the length"),
        ("{type:yarn,factor:four,original_max_position_embeddings:8}", "rope.scaling.factor.*four"),
        ("{type:yarn,factor:4,length:8}", "rope.scaling.length"),
        ("{factor:4}", "rope.scaling.type has no value"),
    ],
)
def test_refused_from_the_command_line(override, message):
    with pytest.raises(SettingsError, match=message):
        parse(composed(f"attention.rope.scaling={override}"))
