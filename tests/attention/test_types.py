"""Each type and setting on one process against its definition, written out: outputs, and gradients by autograd of both."""

import pytest
import torch

from parallel_attn import (
    CrossAttention,
    GroupedLatentAttention,
    GroupedQueryAttention,
    GroupedTiedAttention,
    MultiHeadLatentAttention,
)
from tests.attention.dense import allowed_pairs, dense, linear, rms, turned
from parallel_attn.planning.parity import set_parameters

SETTINGS = [{}, {"window": 4, "causal": False}, {"sinks": True}, {"soft_cap": 1.0}, {"sinks": True, "window": 3, "soft_cap": 2.0}]


def built(make, **settings):
    layer = make(24, name="a", dtype=torch.float64, **settings)
    set_parameters(layer)
    return layer


def agree(layer, definition, *inputs, **given):
    """Output and all gradients of layer(*inputs) and of the definition."""
    results = []
    for function in (lambda *xs: layer(*xs, **given), definition):
        xs = [x.clone().requires_grad_() for x in inputs]
        layer.zero_grad()
        y = function(*xs)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        results.append([y.detach(), *(x.grad for x in xs), *(p.grad.clone() for p in layer.parameters())])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


def core_of(layer, queries, keys):
    config = layer.config
    allowed = allowed_pairs(queries, keys, causal=config.causal, window=config.window)
    sinks = layer.sinks if config.sinks else None
    return lambda q, k, v: dense(q, k, v, scale=layer.scale, allowed=allowed, soft_cap=config.soft_cap, sinks=sinks)


def finished(layer, heads, x):
    """Gate and output projection."""
    if layer.gate is not None:
        gate = torch.sigmoid(linear(x, layer.gate))
        heads = heads * (gate.unsqueeze(-1) if layer.config.gate == "headwise" else gate.view_as(heads))
    return heads.flatten(-2) if layer.o is None else linear(heads.flatten(-2), layer.o)


def inputs(*widths, lengths=(9, 9)):
    return [torch.randn(2, length, width, dtype=torch.float64) for width, length in zip(widths, lengths)]


@pytest.mark.parametrize("extra", SETTINGS, ids=str)
@pytest.mark.parametrize("gate, output", [("none", True), ("headwise", True), ("elementwise", False)])
def test_grouped(extra, gate, output):
    layer = built(GroupedQueryAttention, num_heads=6, num_kv_heads=2, head_dim=8, v_head_dim=5, gate=gate,
                  output_projection=output, rope={"fraction": 0.0}, **extra)  # fmt: skip

    def definition(x):
        q, k, v = (linear(x, m).unflatten(-1, (heads, -1)) for m, heads in ((layer.q, 6), (layer.k, 2), (layer.v, 2)))
        return finished(layer, core_of(layer, 9, 9)(q, k, v), x)

    agree(layer, definition, *inputs(24))


@pytest.mark.parametrize("extra", [{}, {"gate": "elementwise", "bias": "all"}, {"window": 4, "gate": "headwise"}], ids=str)
@pytest.mark.parametrize("q_lora_rank", [None, 7])
@pytest.mark.parametrize("rope, norm", [(4, True), (4, False), (0, True)])
def test_multi_head_latent(extra, q_lora_rank, rope, norm):
    """DeepSeek-V2, eq. 9 to 19; the softmax scale is one over the root of the whole query width."""
    layer = built(MultiHeadLatentAttention, num_heads=3, q_lora_rank=q_lora_rank, kv_lora_rank=10, qk_nope_head_dim=6,
                  qk_rope_head_dim=rope, v_head_dim=5, latent_norm=norm, rope={"style": "interleaved"}, **extra)  # fmt: skip
    assert layer.scale == (6 + rope) ** -0.5

    def normed(x, name):
        return rms(x, getattr(layer, name).weight) if norm else x

    def definition(x):
        q = linear(x, layer.q) if q_lora_rank is None else linear(normed(linear(x, layer.q_a), "q_a_norm"), layer.q_b)
        q = q.unflatten(-1, (3, 6 + rope))
        latent, rope_key = linear(x, layer.kv_a).split([10, rope], -1)
        kv = linear(normed(latent, "kv_a_norm"), layer.kv_b).unflatten(-1, (3, 11))
        k = kv[..., :6]
        if rope:
            q = torch.cat([q[..., :6], turned(q[..., 6:])], -1)
            k = torch.cat([k, turned(rope_key.unsqueeze(2)).expand(-1, -1, 3, -1)], -1)
        return finished(layer, core_of(layer, 9, 9)(q, k, kv[..., 6:]), x)

    agree(layer, definition, *inputs(24))


@pytest.mark.parametrize("latents, heads", [(1, 3), (2, 6), (4, 4)])
@pytest.mark.parametrize("q_lora_rank, rope, norm", [(None, 4, True), (7, 4, False), (7, 0, True)])
def test_grouped_latent(latents, heads, q_lora_rank, rope, norm):
    layer = built(GroupedLatentAttention, num_heads=heads, num_latent_heads=latents, q_lora_rank=q_lora_rank, kv_lora_rank=10,
                  qk_nope_head_dim=6, qk_rope_head_dim=rope, v_head_dim=5, latent_norm=norm, gate="headwise",
                  rope={"style": "interleaved"})  # fmt: skip

    def definition(x):
        if q_lora_rank is None:
            q = linear(x, layer.q)
        else:
            q_latent = linear(x, layer.q_a)
            q = linear(rms(q_latent, layer.q_a_norm.weight) if norm else q_latent, layer.q_b)
        q = q.unflatten(-1, (heads, 6 + rope))
        keys, values = [], []
        for head in range(heads):  # each head reads the latent of its group alone
            group = head // (heads // latents)
            latent = linear(x, layer.kv_a)[..., group * 10 : group * 10 + 10]
            latent = rms(latent, layer.kv_a_norm.weight[group * 10 : group * 10 + 10]) if norm else latent
            up = torch.einsum("bsc,fc->bsf", latent, layer.kv_b.weight[head * 11 : head * 11 + 11])
            keys.append(up[..., :6])
            values.append(up[..., 6:])
        k, v = torch.stack(keys, 2), torch.stack(values, 2)
        if rope:
            q = torch.cat([q[..., :6], turned(q[..., 6:])], -1)
            k = torch.cat([k, turned(linear(x, layer.k_rope).unsqueeze(2)).expand(-1, -1, heads, -1)], -1)
        return finished(layer, core_of(layer, 9, 9)(q, k, v), x)

    agree(layer, definition, *inputs(24))


@pytest.mark.parametrize("fraction", [0.5, 0.25, 1.0, 0.0])
@pytest.mark.parametrize("extra", [{}, {"bias": "all", "gate": "elementwise", "sinks": True}], ids=str)
def test_grouped_tied(fraction, extra):
    layer = built(GroupedTiedAttention, num_heads=6, num_kv_heads=3, head_dim=8,
                  rope={"fraction": fraction, "style": "interleaved"}, **extra)  # fmt: skip
    nope = 8 - int(8 * fraction)

    def definition(x):
        q, tied = linear(x, layer.q).unflatten(-1, (6, 8)), linear(x, layer.kv).unflatten(-1, (3, 8))
        k = tied
        if fraction:
            q = torch.cat([q[..., :nope], turned(q[..., nope:])], -1)
            k = torch.cat([tied[..., :nope], turned(linear(x, layer.k_rope).unsqueeze(2)).expand(-1, -1, 3, -1)], -1)
        return finished(layer, core_of(layer, 9, 9)(q, k, tied), x)

    agree(layer, definition, *inputs(24))


@pytest.mark.parametrize("extra", [{}, {"sinks": True, "gate": "headwise", "bias": "all"}, {"soft_cap": 1.0}], ids=str)
def test_cross(extra):
    layer = built(CrossAttention, num_heads=6, num_kv_heads=2, head_dim=8, memory_size=10, **extra)

    def definition(x, memory):
        q = linear(x, layer.q).unflatten(-1, (6, 8))
        k, v = (linear(memory, m).unflatten(-1, (2, 8)) for m in (layer.k, layer.v))
        return finished(layer, core_of(layer, 5, 9)(q, k, v), x)

    agree(layer, definition, *inputs(24, 10, lengths=(5, 9)))


def test_padding_of_the_encoder_is_as_if_it_were_not_there():
    layer = built(CrossAttention, num_heads=4, memory_size=10, gate="elementwise", qk_norm="head", bias="all")
    x, memory = inputs(24, 10, lengths=(5, 9))
    keep = torch.arange(9) < torch.tensor([[6], [9]])
    memory = memory.masked_fill(~keep.unsqueeze(-1), float("nan")).requires_grad_()
    y = layer(x, memory, key_padding_mask=keep)
    y.square().sum().backward()
    assert torch.equal(memory.grad[0, 6:], torch.zeros(3, 10, dtype=torch.float64)) and memory.grad.isfinite().all()
    torch.testing.assert_close(y[:1], layer(x[:1], memory[:1, :6]))
    longer = torch.cat([memory.detach(), torch.full((2, 4, 10), 7.0, dtype=torch.float64)], 1)
    torch.testing.assert_close(y, layer(x, longer, key_padding_mask=torch.nn.functional.pad(keep, (0, 4))))


def test_a_single_head_and_other_value_widths():
    layer = built(GroupedQueryAttention, num_heads=1, head_dim=8, v_head_dim=24, causal=False, output_projection=False,
                  rope={"fraction": 0.0})  # fmt: skip
    (x,) = inputs(24)
    scores = linear(x, layer.q) @ linear(x, layer.k).transpose(1, 2) / 8**0.5
    torch.testing.assert_close(layer(x), torch.softmax(scores, -1) @ linear(x, layer.v))
