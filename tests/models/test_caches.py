"""Prefill and decode of whole models against one forward over the same tokens."""

import math

import pytest
import torch

from parallel_attn import (
    DecoderLM,
    GroupedLatentAttention,
    GroupedQueryAttention,
    GroupedTiedAttention,
    ModelConfig,
    MultiHeadLatentAttention,
    SettingsError,
)
from parallel_attn.attention import GroupedConfig, GroupedLatentConfig, LatentConfig, TiedConfig
from parallel_attn.models import MlpConfig
from tests.models.test_encoder_decoder import small as encoder_decoder
from tests.parity import world_axis
from tests.world import run

VOCABULARY = 13
KINDS = {
    "gqa": (GroupedQueryAttention, GroupedConfig(6, num_kv_heads=2, head_dim=4, qk_norm="head", bias="all", dropout=0.3)),
    "window": (GroupedQueryAttention, GroupedConfig(6, num_kv_heads=3, head_dim=4, window=5, sinks=True)),
    "mla": (MultiHeadLatentAttention, LatentConfig(6, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2)),
    "gla": (GroupedLatentAttention, GroupedLatentConfig(6, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2)),
    "gta": (GroupedTiedAttention, TiedConfig(6, num_kv_heads=2, head_dim=4)),
}
TOKENS = torch.randint(0, VOCABULARY, (3, 14), generator=torch.Generator().manual_seed(1))


def decoder(kind, axis=None, dtype=torch.float64, **given):
    attention_class, attention = KINDS[kind]
    config = ModelConfig(24, 2, 6, MlpConfig(20), vocab_size=VOCABULARY)
    return DecoderLM(config, attention_class, attention, tensor_parallel=axis, dtype=dtype, **given).eval()


def chunks_case(kind, dtype, bound, rows):
    model, tokens = decoder(kind, world_axis(), dtype), TOKENS[:rows]
    with torch.no_grad():
        wanted = decoder(kind, None, dtype)(tokens)
    for prompt, rest in ((1, (1,) * 13), (6, (1,) * 8), (6, (3, 1, 4)), (13, (1,)), (14, ())):
        logits, cache = model.prefill(tokens[:, :prompt], slots=14)
        found = [logits.unsqueeze(1)]
        for part in tokens[:, prompt:].split(list(rest), 1) if rest else ():
            found.append(model.decode(part, cache))
        found = torch.cat(found, 1)
        torch.testing.assert_close(found, wanted[:, prompt - 1 :], rtol=bound, atol=bound)
    assert cache.length == 14
    elements = model.cache_elements_per_token() * dtype.itemsize
    assert cache.bytes_per_token() == elements
    kept = min(14, model.layers[0].attention.config.window or 14)
    assert cache.bytes() == elements * rows * kept
    with pytest.raises(ValueError, match="full"):
        model.decode(tokens[:, :1], cache)
    with pytest.raises(ValueError, match="rows"):
        model.decode(torch.zeros(rows + 1, 1, dtype=torch.int64), model.new_cache(rows, 4))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_equal_one_forward(kind, degree):
    run(degree, chunks_case, kind, torch.float64, 1e-10, 2)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_prefill_and_decode_in_float32_on_four_ranks(kind):
    run(4, chunks_case, kind, torch.float32, 1e-5, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_with_left_padding_equals_its_single_runs(kind):
    model = decoder(kind)
    lengths = (3, 7, 10)
    tokens = torch.zeros(3, 10, dtype=torch.int64)
    for row, n in enumerate(lengths):
        tokens[row, 10 - n :] = TOKENS[row, :n]
    real = torch.arange(10) >= torch.tensor([[10 - n] for n in lengths])
    logits, cache = model.prefill(tokens, slots=14, key_padding_mask=real)
    found = [logits] + [model.decode(TOKENS[:, 10 + i : 11 + i], cache)[:, 0] for i in range(4)]
    for row, n in enumerate(lengths):
        one, own = model.prefill(TOKENS[row : row + 1, :n], slots=n + 4)
        alone = [one] + [model.decode(TOKENS[row : row + 1, 10 + i : 11 + i], own)[:, 0] for i in range(4)]
        for together, single in zip(found, alone):
            torch.testing.assert_close(together[row], single[0], rtol=1e-10, atol=1e-10)


def test_two_calls_and_other_batches_do_not_see_each_other():
    model = decoder("mla")
    first = model.prefill(TOKENS[:1], slots=14)[0]
    model.prefill(TOKENS[1:], slots=20)
    assert torch.equal(model.prefill(TOKENS[:1], slots=14)[0], first)


def test_slots_that_were_never_written_cannot_leak():
    model, poisoned = decoder("gqa"), decoder("gqa")
    cache = poisoned.new_cache(2, 14)
    for layer in cache:
        for tensor in layer.tensors.values():
            tensor.fill_(math.nan)
    with torch.no_grad():
        found = poisoned(TOKENS[:2, :6], cache=cache)[:, -1], poisoned.decode(TOKENS[:2, 6:7], cache)[:, 0]
    wanted, other = model.prefill(TOKENS[:2, :6], slots=7)
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], model.decode(TOKENS[:2, 6:7], other)[:, 0], rtol=1e-12, atol=1e-12)


def test_the_cache_has_the_compute_dtype():
    model = decoder("gqa", dtype=torch.float32, compute_dtype=torch.bfloat16)
    logits, cache = model.prefill(TOKENS, slots=14)
    assert {t.dtype for layer in cache for t in layer.tensors.values()} == {torch.bfloat16}
    assert cache.bytes_per_token() == 2 * model.cache_elements_per_token()


def encoder_decoder_case():
    """The encoder reads all but the last token of a prompt; so does one forward with the encoder that long."""
    tokens = TOKENS[:2] % 11
    alone = encoder_decoder(None, read=5, qk_norm="full").eval()
    model = encoder_decoder(world_axis(), read=5, qk_norm="full").eval()
    with torch.no_grad():
        wanted = alone(tokens)  # (2, 9, V): of tokens 5 to 13
    logits, cache = model.prefill(tokens[:, :6], slots=14)
    found = [logits] + [model.decode(part, cache) for part in tokens[:, 6:].split([1, 3, 1, 3], 1)]
    found = torch.cat([found[0].unsqueeze(1), *found[1:]], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    own, context = model.cache_elements_per_token(), model.context_cache_elements_per_token()
    assert cache.bytes_per_token() == 8 * own and cache.bytes() == 8 * 2 * (9 * own + 5 * context)


@pytest.mark.parametrize("degree", [1, 2])
def test_an_encoder_decoder_reads_the_prompt_once(degree):
    run(degree, encoder_decoder_case)


def test_prompts_of_an_encoder_decoder():
    model, tokens = encoder_decoder(None, read=5).eval(), TOKENS[:2] % 11
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    logits, cache = model.prefill(tokens[:, :5], slots=9, key_padding_mask=real)
    after = model.decode(tokens[:, 5:6], cache)
    for row, first in enumerate((2, 0)):
        alone, own = model.prefill(tokens[row : row + 1, first:5], slots=9)
        torch.testing.assert_close(logits[row], alone[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(after[row], model.decode(tokens[row : row + 1, 5:6], own)[0], rtol=1e-10, atol=1e-10)
    with pytest.raises(SettingsError, match="nothing to read"):
        model.prefill(tokens[:, :1], slots=9)
    assert model.most_tokens(6, 9) == 9 and model.most_tokens(3, 9) == 6
    with pytest.raises(SettingsError, match="it has 7 tokens; the encoder reads .* give 2 to 6"):
        model.most_tokens(7, 9)
    assert decoder("gqa").most_tokens(6, 9) == 9
    with pytest.raises(SettingsError, match="no token"):
        decoder("gqa").most_tokens(0, 9)
