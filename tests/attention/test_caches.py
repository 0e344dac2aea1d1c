"""Caches: any way to cut a sequence into chunks gives the output of one forward, whatever the slots held before."""

import math

import pytest
import torch

from parallel_attn import CrossAttention, GroupedQueryAttention, MultiHeadLatentAttention, SettingsError
from tests.attention.family import TYPES
from tests.parity import world_axis
from tests.world import run

CHUNKS = [(16,), (1,) * 16, (3, 3, 3, 3, 3, 1), (5, 1, 4, 1, 5), (1, 15)]
CASES = {
    "mha": ("gqa", dict(num_kv_heads=4)),
    "gqa": ("gqa", dict(num_kv_heads=2, bias="all", gate="elementwise", v_head_dim=6)),
    "mqa-full-norm": ("gqa", dict(num_kv_heads=1, qk_norm="full", gate="headwise", rope={"style": "interleaved"})),
    "gqa-head-norm-sinks": ("gqa", dict(num_kv_heads=2, head_dim=8, qk_norm="head", sinks=True, rope={"fraction": 0.5})),
    "gqa-window": ("gqa", dict(num_kv_heads=2, window=4)),
    "gqa-window-sinks-cap": ("gqa", dict(num_kv_heads=2, window=5, sinks=True, soft_cap=1.5, dropout=0.3)),
    "mla": ("mla", dict(kv_lora_rank=6, q_lora_rank=5, v_head_dim=5)),
    "mla-replicated": ("mla", dict(kv_lora_rank=6, down_projection="replicated", bias="all", gate="elementwise")),
    "mla-window-cap": ("mla", dict(kv_lora_rank=6, qk_rope_head_dim=0, window=4, soft_cap=1.5, latent_norm=False)),
    "gla": ("gla", dict(kv_lora_rank=6, sinks=True)),
    "gla-window": ("gla", dict(kv_lora_rank=6, q_lora_rank=5, window=4, qk_rope_head_dim=0)),
    "gta": ("gta", dict(num_kv_heads=2, head_dim=8, bias="all")),
    "gta-window": ("gta", dict(num_kv_heads=2, window=4, rope={"fraction": 0.0}, gate="headwise")),
}


def built(kind, settings, axis=None, dtype=torch.float64, **extra):
    layer = TYPES[kind](24, num_heads=4, tensor_parallel=axis, name="layer", dtype=dtype, **settings, **extra).eval()
    return layer.requires_grad_(False)


def filled_with_nan(cache):
    for tensor in cache.tensors.values():
        tensor.fill_(math.nan)
    return cache


def in_chunks(layer, x, chunks, cache, key_padding_mask=None):
    parts = []
    for part, mask in zip(
        x.split(list(chunks), 1), [None] * len(chunks) if key_padding_mask is None else key_padding_mask.split(list(chunks), 1)
    ):
        parts.append(layer(part, cache=cache, key_padding_mask=mask))
    return torch.cat(parts, 1)


def inputs(batch=2, length=16, width=24, dtype=torch.float64):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)


def chunks_case(name, dtype, bound):
    kind, settings = CASES[name]
    layer = built(kind, settings, world_axis(), dtype)
    x = inputs(dtype=dtype)
    wanted = built(kind, settings, None, dtype)(x)
    for chunks in CHUNKS:
        cache = filled_with_nan(layer.new_cache(2, 16))
        found = in_chunks(layer, x, chunks, cache)
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound, msg=lambda text: f"{chunks}: {text}")
    # what is declared is what is there, on every rank
    rank = world_axis().rank
    assert cache.bytes_per_token() == layer.cache_elements_per_token() * x.element_size()
    assert layer.cache_elements_per_token() == layer.cache_elements_per_token(rank)
    held = sum(t.numel() for t in cache.tensors.values())
    assert held == 2 * min(16, settings.get("window") or 16) * layer.cache_elements_per_token()


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_any_chunks_give_one_forward(degree, name):
    run(degree, chunks_case, name, torch.float64, 1e-10)


@pytest.mark.parametrize("name", ["gqa", "mqa-full-norm", "mla", "gla"])
def test_with_copies_on_four_ranks(name):
    run(4, chunks_case, name, torch.float32, 1e-5)


@pytest.mark.parametrize("chunks", [(16,), (9, 7), (9, 3, 4), (9, *(1,) * 7)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_left_padding_equals_single_rows(name, chunks):
    layer, x = built(*CASES[name]), inputs(3)
    lengths = (3, 7, 12)
    real = torch.arange(16) >= torch.tensor([[16 - n - 4] for n in lengths])  # of each n tokens, then 4 more
    x = x.masked_fill(~real.unsqueeze(-1), math.nan)
    together = in_chunks(layer, x, chunks, filled_with_nan(layer.new_cache(3, 16)), real)
    for row, n in enumerate(lengths):
        alone = layer(x[row : row + 1, 16 - n - 4 :])
        torch.testing.assert_close(together[row : row + 1, 16 - n - 4 :], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_padding_may_end_with_the_prompt(name):
    """The mask is given with the prompt only: what comes after is real."""
    layer, x = built(*CASES[name]), inputs(2)
    real = torch.arange(16) >= torch.tensor([[0], [5]])
    cache = layer.new_cache(2, 16)
    layer(x[:, :8], cache=cache, key_padding_mask=real[:, :8])
    rest = torch.cat([layer(x[:, 8:10], cache=cache), *(layer(x[:, i : i + 1], cache=cache) for i in range(10, 16))], 1)
    for row, first in enumerate((0, 5)):
        wanted = layer(x[row : row + 1, first:])[:, 8 - first :]
        torch.testing.assert_close(rest[row : row + 1], wanted, rtol=1e-10, atol=1e-10)


def test_positions_are_those_of_the_row():
    """Scaled and turned alike: a layer that is given its positions sees the same as one whose cache counts them."""
    layer, x = built("gqa", dict(num_kv_heads=2)), inputs(1)
    counted, given = layer.new_cache(1, 16), layer.new_cache(1, 16)
    layer(x[:, :10], cache=counted), layer(x[:, :10], cache=given, positions=torch.arange(10))
    torch.testing.assert_close(
        layer(x[:, 10:], cache=counted), layer(x[:, 10:], cache=given, positions=torch.arange(10, 16))
    )


def test_a_ring_holds_the_window_only():
    layer, x = built("gqa", dict(num_kv_heads=2, window=4)), inputs(1, 200)
    cache = layer.new_cache(1, 200)
    assert cache.tensors["k"].shape == (1, 2, 4, 6)
    torch.testing.assert_close(in_chunks(layer, x, (5, 90, *(1,) * 7, 98), cache), layer(x), rtol=1e-10, atol=1e-10)


def test_a_latent_is_cached_and_no_key_or_value():
    """Decoding never makes keys or values by head: no tensor of T x heads x (nope + value) elements appears."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                    self.found = max(self.found, tensor.numel())
            return out

    layer = MultiHeadLatentAttention(
        24, num_heads=8, kv_lora_rank=6, qk_nope_head_dim=6, v_head_dim=6, qk_rope_head_dim=4, name="a"
    ).requires_grad_(False)
    x, tokens = torch.randn(1, 301, 24), 300
    cache = layer.new_cache(1, 301)
    layer(x[:, :tokens], cache=cache)
    with Largest() as largest:
        layer(x[:, tokens:], cache=cache)
    scores = tokens * 8  # the core may write out one score for each head and token
    assert largest.found <= scores + 16 * 8 < tokens * 8 * 6


def cross_case():
    settings = dict(num_heads=4, num_kv_heads=2, qk_norm="full", bias="all", dtype=torch.float64, memory_size=14)
    make = dict(name="layer", **settings)
    x, memory = inputs(), inputs(length=7, width=14)
    real = torch.arange(7) < torch.tensor([[3], [7]])
    alone = CrossAttention(24, **make).requires_grad_(False)
    layer = CrossAttention(24, tensor_parallel=world_axis(), **make).requires_grad_(False)
    wanted = alone(x, memory, key_padding_mask=real)
    cache = filled_with_nan(layer.new_cache(2, 7))
    found = [layer(x[:, :5], memory, key_padding_mask=real, cache=cache)]
    memory.fill_(math.nan)  # read once
    found += [layer(part, None, cache=cache) for part in x[:, 5:].split(4, 1)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-10, atol=1e-10)
    assert cache.bytes_per_token() == 8 * layer.cache_elements_per_token()
    with pytest.raises(ValueError, match="give one of them"):
        layer(x, memory, cache=cache)
    with pytest.raises(ValueError, match="give one of them"):
        layer(x, None)


@pytest.mark.parametrize("degree", [1, 2])
def test_cross_attention_reads_the_memory_once(degree):
    run(degree, cross_case)


def test_rows_do_not_see_each_other_nor_a_call_the_one_before():
    layer, x = built("mla", CASES["mla"][1]), inputs(3)
    cache = layer.new_cache(3, 16)
    first = layer(x, cache=cache)
    cache.reset()
    assert torch.equal(layer(x, cache=cache), first)
    one = layer.new_cache(1, 16)
    torch.testing.assert_close(layer(x[1:2], cache=one), first[1:2], rtol=1e-12, atol=1e-12)


def test_what_a_cache_cannot_take_is_one_line():
    layer, x = built("gqa", dict(num_kv_heads=2)), inputs()
    cache = layer.new_cache(2, 8)
    with pytest.raises(ValueError, match="cache for 2 rows, given 1"):
        layer(x[:1, :4], cache=cache)
    with pytest.raises(ValueError, match="cache of 8 slots is full: 0 tokens in it, 16 more"):
        layer(x, cache=cache)
    other = built("mla", CASES["mla"][1])
    with pytest.raises(ValueError, match="cache of another layer: it keeps .*latent.* needs .*'k'"):
        layer(x[:, :4], cache=other.new_cache(2, 8))
    with pytest.raises(ValueError, match="in a window of 3"):
        layer(x[:, :4], cache=built("gqa", dict(num_kv_heads=2, window=3)).new_cache(2, 8))
    with pytest.raises(ValueError, match="leave them out"):
        layer(x[:, :4], cache=cache, document_ids=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="causal=false"):
        both = built("gqa", dict(num_kv_heads=2, causal=False))
        both(x[:, :4], cache=both.new_cache(2, 8))
    for batch, slots in ((0, 8), (2, 0), (2, 8.0)):
        with pytest.raises(SettingsError, match="at least 1"):
            layer.new_cache(batch, slots)
    training = GroupedQueryAttention(24, num_heads=4, name="a", dtype=torch.float64)
    with pytest.raises(ValueError, match="no_grad"):
        training(x, cache=training.new_cache(2, 16))
    assert cache.length == 0
    with torch.inference_mode():
        layer(x[:, :4], cache=cache)
    with torch.no_grad():  # a cache belongs to no mode
        layer(x[:, 4:8], cache=cache)
