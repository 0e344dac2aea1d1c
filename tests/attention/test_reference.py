"""The one-process layer against code that nobody here wrote: transformers' layers with random weights, and plain einsum."""

import math

import pytest
import torch

from parallel_attn import GroupedQueryAttention
from parallel_attn.planning.parity import set_parameters


def einsum_attention(layer, x, allowed):
    """Query head h uses KV head h // g; softmax in float64; rows without keys give zeros."""
    q, k, v = (
        torch.einsum("bsd,fd->bsf", x, lin.weight) + (0 if lin.bias is None else lin.bias)
        for lin in (layer.q, layer.k, layer.v)
    )
    q, k = (layer.rotary(t.unflatten(-1, (-1, layer.head_dim))) for t in (q, k))
    v = v.unflatten(-1, (-1, layer.v_head_dim))
    group = q.shape[2] // k.shape[2]
    outs = []
    for head in range(q.shape[2]):
        scores = torch.einsum("bse,bte->bst", q[:, :, head], k[:, :, head // group]) / math.sqrt(layer.head_dim)
        weights = torch.softmax(scores.masked_fill(~allowed, -1e300), -1) * allowed.any(-1, keepdim=True)
        outs.append(torch.einsum("bst,bte->bse", weights * allowed, v[:, :, head // group]))
    y = torch.einsum("bsf,df->bsd", torch.cat(outs, -1), layer.o.weight)
    return y if layer.o.bias is None else y + layer.o.bias


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (8, 1), (6, 3)])
@pytest.mark.parametrize("widths", [(8, 8), (6, 10), (10, 4)])
@pytest.mark.parametrize("masking", ["causal", "full", "padding", "documents"])
def test_against_a_loop_over_heads(heads, kv_heads, widths, masking):
    layer = GroupedQueryAttention(
        12, num_heads=heads, num_kv_heads=kv_heads, head_dim=widths[0], v_head_dim=widths[1], bias="all",
        causal=masking != "full", name="a", dtype=torch.float64,
    )  # fmt: skip
    set_parameters(layer)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    allowed, masks = causal.expand(2, 7, 7), {}
    if masking == "full":
        allowed = torch.ones(2, 7, 7, dtype=torch.bool)
    if masking == "padding":  # left and right padding, and a row of padding only
        keep = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]]).bool()
        masks, allowed = {"key_padding_mask": keep}, causal & keep.unsqueeze(1)
        x = x * keep.unsqueeze(-1)
    if masking == "documents":
        ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [4, 4, 7, 4, 7, 7, 7]])
        masks, allowed = {"document_ids": ids}, causal & (ids.unsqueeze(1) == ids.unsqueeze(2))
    torch.testing.assert_close(layer(x, **masks), einsum_attention(layer, x, allowed), rtol=1e-9, atol=1e-9)


def grads_agree(ours, theirs, pairs, bound=1e-5):
    largest = max(grad.abs().max().item() for _, grad in pairs)
    for got, wanted in pairs:
        scale = max(wanted.abs().max().item(), 1e-3 * largest)
        assert (got - wanted).abs().max().item() <= bound * scale


@pytest.mark.parametrize("kind", ["llama", "llama-bias", "qwen2", "qwen3", "olmo2"])
def test_against_transformers(kind):
    """Output, input gradient and every weight gradient, float32."""
    from transformers import AutoConfig
    from transformers.models.llama import modeling_llama
    from transformers.models.olmo2 import modeling_olmo2
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

    module, name, ours = {
        "llama": (modeling_llama, "Llama", {}),
        "llama-bias": (modeling_llama, "Llama", {"bias": "all"}),
        "qwen2": (modeling_qwen2, "Qwen2", {"bias": "qkv"}),
        "qwen3": (modeling_qwen3, "Qwen3", {"qk_norm": "head"}),
        "olmo2": (modeling_olmo2, "Olmo2", {"qk_norm": "full"}),
    }[kind]
    width, heads, kv_heads = 64, 8, 2
    config = AutoConfig.for_model(
        name.lower(), hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8,
        rms_norm_eps=1e-6, attention_bias=kind == "llama-bias", attn_implementation="eager",
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = getattr(module, f"{name}Attention")(config, 0)
    layer = GroupedQueryAttention(width, num_heads=heads, num_kv_heads=kv_heads, head_dim=8, name="a", **ours)
    set_parameters(layer)
    named = {name: parameter for name, parameter in layer.named_parameters()}
    renamed = {f"{n[0]}_proj.{n[2:]}" if n[1] == "." else n: p.detach() for n, p in named.items()}
    theirs.load_state_dict(renamed)
    x = torch.randn(2, 40, width, requires_grad=True)
    x_theirs = x.detach().clone().requires_grad_()
    rotary = getattr(module, f"{name}RotaryEmbedding")(config)
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    wanted = theirs(x_theirs, position_embeddings=rotary(x, torch.arange(40)[None]), attention_mask=mask)[0]
    got = layer(x)
    weights = torch.randn_like(got)
    (got * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    their_grads = dict(theirs.named_parameters())
    pairs = [(p.grad, their_grads[n].grad) for n, p in zip(renamed, named.values())]
    grads_agree(layer, theirs, [*pairs, (x.grad, x_theirs.grad)])


def test_mha_mqa_and_gqa_are_told_apart_by_kv_heads():
    assert GroupedQueryAttention(64, num_heads=8).plan.num_kv_heads == 2
    for heads, kv_heads in [(1, 1), (2, 2), (5, 5), (12, 3), (16, 4), (18, 3), (40, 10)]:
        got = GroupedQueryAttention(heads * 2, num_heads=heads).plan.num_kv_heads
        assert got == kv_heads, f"{heads} heads: {got}"
    for kv_heads, elements in [(8, 512), (1, 64), (4, 256)]:  # elements cached per token, width 256, 8 heads
        assert GroupedQueryAttention(256, num_heads=8, num_kv_heads=kv_heads).cache_elements_per_token() == elements
