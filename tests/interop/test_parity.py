"""Whole models against transformers' with the same random weights: logits and the gradient of every tensor.

transformers computes some steps in float32 whatever the model's dtype: rotary frequencies and angles, the statistics of
its norms, the eager softmax, DeepSeek-V2's rotation. Against a float64 model of it our error is therefore float32's
(FLOAT32_STEPS below); with those steps widened to float64 (tests/widened.py) only float64's own rounding is left.
"""

import contextlib
from dataclasses import replace

import pytest
import torch

from tests.interop.models import (
    DEEPSEEK, LLAMA3, QWEN3_NEXT, SIZES, YARN, ours_on, ours_on_the_world, passed, their_config, their_model,
)  # fmt: skip
from tests.widened import Widened
from tests.world import run

FLOAT32_STEPS = 5e-6  # (measured: 1.3e-6 at most)
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 8, "beta_slow": 1}
LLAMA = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2}

CASES = {
    "llama": ("llama", LLAMA),
    "llama-bias-tied-wide-heads-llama3": (
        "llama",
        {**LLAMA, "head_dim": 10, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "qwen2-yarn": ("qwen2", {**LLAMA, "num_key_value_heads": 3, "rope_parameters": YARN}),
    "qwen2-window-one-kv-head": (
        "qwen2",
        {**LLAMA, "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3-bias-linear": (
        "qwen3",
        {**LLAMA, "hidden_size": 40, "head_dim": 12, "attention_bias": True,
         "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "qwen3-next": ("qwen3_next", {**QWEN3_NEXT, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}),
    "qwen3-next-bias-one-kv-head": (
        "qwen3_next",
        {**QWEN3_NEXT, "num_key_value_heads": 1, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "qwen3.5-tied": ("qwen3_5_text", {**QWEN3_NEXT, "tie_word_embeddings": True, "partial_rotary_factor": 0.5}),
    "deepseek-v2-yarn": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": MSCALE}),
    "deepseek-v2-query-latent-bias": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": 14, "attention_bias": True}),
    "deepseek-v3-yarn": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 14, "rope_parameters": MSCALE}),
    "deepseek-v3-half-tied-bias": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "tie_word_embeddings": True,
         "rope_parameters": {**YARN, "mscale_all_dim": 0.5}},
    ),
}  # fmt: skip
MODES = {  # dtype, whether their float32 steps are widened, bound
    "float32": (torch.float32, False, 1e-5),
    "float64": (torch.float64, True, 1e-9),
    "float64-theirs-as-it-is": (torch.float64, False, FLOAT32_STEPS),
}


def errors(theirs, ours):
    """Largest differences as a share of the scale: of the logits, and of each gradient (or 1e-3 of the largest)."""
    (wanted, wanted_grads), (got, got_grads) = theirs, ours
    assert got.dtype == wanted.dtype and set(got_grads) == set(wanted_grads)
    found = {"logits": ((got - wanted).abs().max() / wanted.abs().max()).item()}
    largest = max(grad.abs().max().item() for grad in wanted_grads.values())
    for name, grad in wanted_grads.items():
        scale = max(grad.abs().max().item(), 1e-3 * largest)
        found[name] = (got_grads[name] - grad).abs().max().item() / scale
    return found


def their_run(model_type, settings, dtype, widened):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, settings["vocab_size"], (2, 72), generator=generator)
    weights = torch.randn(2, 72, settings["vocab_size"], generator=generator, dtype=torch.float64).to(dtype)
    config = their_config(model_type, **settings)
    with Widened() if widened else contextlib.nullcontext():
        model = their_model(config, dtype)
        result = passed(model, tokens, weights), {n: p.grad for n, p in model.named_parameters()}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return result, (config.to_dict(), tensors, tokens, weights)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_model_of_transformers(case, mode):
    dtype, widened, bound = MODES[mode]
    theirs, given = their_run(*CASES[case], dtype, widened)
    assert theirs[0].abs().max() > 0.5
    results = {1: ours_on(*given)}
    if mode != "float64-theirs-as-it-is":
        results[2] = run(2, ours_on_the_world, *given)[0]
    for degree, ours in results.items():
        wrong = {name: error for name, error in errors(theirs, ours).items() if not error <= bound}
        assert not wrong, f"degree {degree}, beyond {bound}: {wrong}"


def with_attention(**settings):
    def change(translation):
        architecture = translation.architecture
        return replace(
            translation, architecture=replace(architecture, attention=replace(architecture.attention, **settings))
        )

    return change


def with_rope(**settings):
    return lambda translation: with_attention(rope=replace(translation.architecture.attention.rope, **settings))(
        translation
    )


def gate_before_query(translation):
    swapped = [replace(e, ours=e.ours[::-1]) if len(e.ours) == 2 else e for e in translation.entries]
    return replace(translation, entries=tuple(swapped))


def gate_behind_all_heads(translation):
    """q_proj cut in the middle, as if it held all queries and then all gates."""

    def halves(packed):
        return packed.chunk(2)

    def together(first, second):
        return (torch.cat([first, second]),)

    spoiled = [replace(e, to_ours=halves, to_theirs=together) if len(e.ours) == 2 else e for e in translation.entries]
    return replace(translation, entries=tuple(spoiled))


def without_multiplier(translation):
    scaling = replace(translation.architecture.attention.rope.scaling, mscale=None, mscale_all_dim=None)
    return with_rope(scaling=replace(scaling, attention_factor=scaling.cos_sin_factor))(translation)


MUTANTS = {
    "other-pairs": ("deepseek-v3-yarn", with_rope(style="half")),
    "pairs-as-by-default": ("deepseek-v3-half-tied-bias", with_rope(style="interleaved")),
    "theta-by-default": ("qwen3-next", with_rope(theta=10000.0)),
    "whole-heads-turned": ("qwen3-next", with_rope(fraction=1.0)),
    "no-scaling": ("llama-bias-tied-wide-heads-llama3", with_rope(scaling=None)),
    "no-mscale": ("deepseek-v2-yarn", without_multiplier),
    "latent-norm-with-the-models-eps": ("deepseek-v2-query-latent-bias", with_attention(latent_norm_eps=1e-3)),
    "no-window": ("qwen2-window-one-kv-head", with_attention(window=None)),
    "gate-before-query": ("qwen3-next", gate_before_query),
    "gate-behind-all-heads": ("qwen3.5-tied", gate_behind_all_heads),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_translation_is_far_beyond_the_bound(mutant):
    case, change = MUTANTS[mutant]
    theirs, given = their_run(*CASES[case], torch.float32, False)
    assert errors(theirs, ours_on(*given, change=change))["logits"] > 1e-4
