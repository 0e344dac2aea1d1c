"""What is masked cannot leak, not even a NaN; rows without keys are zero; causality is bottom-right aligned."""

import math

import pytest
import torch

from parallel_attn import (
    GroupedLatentAttention,
    GroupedQueryAttention,
    GroupedTiedAttention,
    MultiHeadLatentAttention,
)
from parallel_attn.attention.kernels import attend


def layer(**settings):
    return GroupedQueryAttention(16, num_heads=4, num_kv_heads=2, name="a", dtype=torch.float64, **settings)


def gated(**settings):
    return layer(bias="all", qk_norm="full", gate="headwise", sinks=True, window=4, **settings)


def latent(**settings):
    return MultiHeadLatentAttention(
        16, num_heads=4, q_lora_rank=6, bias="all", soft_cap=2.0, name="a", dtype=torch.float64, **settings
    )


def grouped_latent(**settings):
    return GroupedLatentAttention(16, num_heads=4, gate="elementwise", name="a", dtype=torch.float64, **settings)


def tied(**settings):
    return GroupedTiedAttention(16, num_heads=4, bias="all", name="a", dtype=torch.float64, **settings)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make", [layer, gated, latent, grouped_latent, tied], ids=lambda make: make.__name__)
def test_padded_slots_reach_nothing(poison, causal, make):
    attention = make(causal=causal)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]).bool()
    clean = torch.randn(2, 6, 16, dtype=torch.float64)
    results = []
    for value in (0.0, poison):
        x = clean.masked_fill(~keep.unsqueeze(-1), value).requires_grad_()
        attention.zero_grad()
        y = attention(x, key_padding_mask=keep)
        y[keep].square().sum().backward()
        results.append([y.detach()[keep], x.grad[keep], *(p.grad.clone() for p in attention.parameters())])
        assert torch.equal(x.grad[~keep], torch.zeros_like(x.grad[~keep])), "a gradient at a padded slot"
    for got, wanted in zip(results[1], results[0]):
        assert got.isfinite().all() and torch.equal(got, wanted)


def test_a_row_of_padding_only_is_zero_and_leaves_the_others_alone():
    attention = layer()
    keep = torch.tensor([[0, 0, 0], [1, 1, 1]]).bool()
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    y = attention(x, key_padding_mask=keep)
    y.square().sum().backward()
    assert torch.equal(y[0].detach(), torch.zeros(3, 16, dtype=torch.float64))
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in attention.parameters())
    torch.testing.assert_close(y[1:], attention(x[1:]))


def test_leading_padding_under_causality_gives_zeros_not_nan():
    attention = layer()
    keep = torch.tensor([[0, 0, 1, 1]]).bool()
    y = attention(torch.randn(1, 4, 16, dtype=torch.float64), key_padding_mask=keep)
    assert torch.equal(y[0, :2], torch.zeros(2, 16, dtype=torch.float64)) and y[0, 2:].abs().min() > 0


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_documents_are_as_if_alone(poison):
    attention = layer()
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    spoiled = x.clone()
    spoiled[:, :3] = poison
    y = attention(spoiled, document_ids=ids)
    alone = attention(x[:, 3:], positions=torch.arange(3, 7))
    torch.testing.assert_close(y[:, 3:], alone)
    # positions count on inside a row; rotary depends on distances only
    torch.testing.assert_close(alone, attention(x[:, 3:]))


@pytest.mark.parametrize("queries", [1, 3, 7])
def test_causality_is_bottom_right_aligned(queries):
    """The last `queries` of 7 positions: the same as the last rows of the square case."""
    q, k, v = (torch.randn(2, 7, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = attend(q, k, v, scale=0.3, causal=True)
    part = attend(q[:, -queries:], k, v, scale=0.3, causal=True)
    torch.testing.assert_close(part, whole[:, -queries:])
    ids = torch.tensor([[0, 0, 1, 1, 1, 0, 1]] * 2)
    whole = attend(q, k, v, scale=0.3, causal=True, document_ids=ids)
    part = attend(q[:, -queries:], k, v, scale=0.3, causal=True, document_ids=ids)
    torch.testing.assert_close(part, whole[:, -queries:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_width", [8, 12])
def test_training_takes_the_fused_kernel(dtype, v_width):
    """Also with groups and with unequal widths: never the path that stores S x S scores."""
    q, k = torch.randn(1, 64, 4, 8, dtype=dtype), torch.randn(1, 64, 2, 8, dtype=dtype)
    v = torch.randn(1, 64, 2, v_width, dtype=dtype)
    with torch.profiler.profile() as profile:
        attend(q, k, v, scale=0.3, causal=True)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
