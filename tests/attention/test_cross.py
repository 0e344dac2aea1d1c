"""Cross attention against torch's own nn.MultiheadAttention: values and every gradient, decoder and encoder of different
widths, grouped heads, encoder padding."""

import pytest
import torch
from torch import nn

from parallel_attn import CrossAttention, GroupedQueryAttention, MultiHeadLatentAttention, SettingsError
from parallel_attn.attention import GroupedConfig, LatentConfig
from parallel_attn.planning.parity import set_parameters

D, M, HEADS = 24, 14, 6


def theirs_from(layer: CrossAttention, kv_heads: int) -> nn.MultiheadAttention:
    """torch's layer with the same weights: each KV head once for every query head of its group."""
    theirs = nn.MultiheadAttention(D, HEADS, kdim=M, vdim=M, batch_first=True, dtype=torch.float64)

    def repeated(weight):
        return weight.unflatten(0, (kv_heads, -1)).repeat_interleave(HEADS // kv_heads, 0).flatten(0, 1)

    with torch.no_grad():
        theirs.q_proj_weight.copy_(layer.q.weight)
        theirs.k_proj_weight.copy_(repeated(layer.k.weight))
        theirs.v_proj_weight.copy_(repeated(layer.v.weight))
        theirs.in_proj_bias.copy_(torch.cat([layer.q.bias, repeated(layer.k.bias), repeated(layer.v.bias)]))
        theirs.out_proj.weight.copy_(layer.o.weight)
        theirs.out_proj.bias.copy_(layer.o.bias)
    return theirs


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("padded", [False, True])
def test_values_and_gradients_of_torchs_multihead_attention(kv_heads, padded):
    layer = CrossAttention(
        D, memory_size=M, num_heads=HEADS, num_kv_heads=kv_heads, bias="all", name="a", dtype=torch.float64
    )
    set_parameters(layer)
    theirs = theirs_from(layer, kv_heads)
    generator = torch.Generator().manual_seed(0)
    x, memory = (torch.randn(2, n, width, generator=generator, dtype=torch.float64) for n, width in ((5, D), (8, M)))
    keep = torch.arange(8) < torch.tensor([[3], [8]]) if padded else None
    ours_in, theirs_in = ([t.clone().requires_grad_() for t in (x, memory)] for _ in range(2))
    got = layer(*ours_in, key_padding_mask=keep)
    wanted, _ = theirs(theirs_in[0], theirs_in[1], theirs_in[1], key_padding_mask=None if keep is None else ~keep)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    weights = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    (got * weights).sum().backward()
    (wanted * weights).sum().backward()

    def summed(grad):  # over the group that shares a head
        return grad.unflatten(0, (kv_heads, HEADS // kv_heads, -1)).sum(1).flatten(0, 1)

    q_bias, k_bias, v_bias = theirs.in_proj_bias.grad.chunk(3)
    pairs = [
        (layer.q.weight.grad, theirs.q_proj_weight.grad),
        (layer.k.weight.grad, summed(theirs.k_proj_weight.grad)),
        (layer.v.weight.grad, summed(theirs.v_proj_weight.grad)),
        (layer.q.bias.grad, q_bias),
        (layer.k.bias.grad, summed(k_bias)),
        (layer.v.bias.grad, summed(v_bias)),
        (layer.o.weight.grad, theirs.out_proj.weight.grad),
        (layer.o.bias.grad, theirs.out_proj.bias.grad),
        *((a.grad, b.grad) for a, b in zip(ours_in, theirs_in)),
    ]
    for ours, other in pairs:
        torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-9)
    if padded:
        assert (ours_in[1].grad[0, 3:] == 0).all()


def test_the_gate_is_on_the_heads_output():
    layer = CrossAttention(D, memory_size=M, num_heads=HEADS, gate="headwise", name="a", dtype=torch.float64)
    plain = CrossAttention(D, memory_size=M, num_heads=HEADS, name="a", output_projection=False, dtype=torch.float64)
    for each in (layer, plain):
        set_parameters(each)
    x, memory = torch.randn(2, 5, D, dtype=torch.float64), torch.randn(2, 8, M, dtype=torch.float64)
    gate = torch.einsum("bsd,hd->bsh", x, layer.gate.weight).sigmoid()
    heads = plain(x, memory).unflatten(-1, (HEADS, -1)) * gate.unsqueeze(-1)
    torch.testing.assert_close(layer(x, memory), heads.flatten(-2) @ layer.o.weight.t())


def test_settings_of_self_attention_become_their_cross_form():
    made = CrossAttention.config_from(GroupedQueryAttention, GroupedConfig(8, num_kv_heads=2, gate="headwise"))
    assert (made.num_kv_heads, made.gate, made.causal, made.rope.fraction) == (2, "headwise", False, 0.0)
    with pytest.raises(SettingsError, match="k.window=4: CrossAttention has no order"):
        CrossAttention.config_from(GroupedQueryAttention, GroupedConfig(8, window=4), "k")
    with pytest.raises(SettingsError, match="k: MultiHeadLatentAttention has no cross form"):
        CrossAttention.config_from(MultiHeadLatentAttention, LatentConfig(8), "k")
