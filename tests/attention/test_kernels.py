"""Which kernel serves what, and that windows and documents never make an S x S matrix."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_attn.attention.kernels import attend
from tests.attention.dense import allowed_pairs, dense


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def tensors(length, dtype=torch.float32, heads=2, kv_heads=1, width=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, length, heads, width), (1, length, kv_heads, width), (1, length, kv_heads, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("how", ["window", "window+sinks", "soft cap", "documents"])
def test_memory_grows_with_the_sequence_not_with_its_square(how, causal):
    length = 2048
    q, k, v = tensors(length)
    settings = {
        "window": {"window": 16},
        "window+sinks": {"window": 16, "sinks": torch.zeros(2, requires_grad=True)},
        "soft cap": {"soft_cap": 3.0},
        "documents": {"document_ids": (torch.arange(length) // 64)[None]},
    }[how]
    with Largest() as largest:
        attend(q, k, v, scale=0.3, causal=causal, **settings).sum().backward()
    assert largest.elements < length * length / 4, f"{how}: {largest.elements} elements at once"


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length, window", [(200, 1), (200, 7), (200, 64), (193, 70), (300, 70), (128, 64), (129, 64)])
def test_banded_blocks_are_the_window(length, window, causal, sinks):
    """Lengths that fill blocks or not, windows below, at and above the block; outputs and all gradients."""
    results = []
    padding = torch.ones(1, length, dtype=torch.bool)
    padding[0, [0, 5, 66, length - 1]] = False
    for way in ("attend", "dense"):
        q, k, v = tensors(length, torch.float64, heads=4, kv_heads=2)
        s = torch.tensor([0.5, -0.5, 1.0, 0.0], dtype=torch.float64, requires_grad=True) if sinks else None
        if way == "attend":
            out = attend(q, k, v, scale=0.3, causal=causal, window=window, sinks=s, key_padding_mask=padding)
        else:
            allowed = allowed_pairs(length, length, causal=causal, window=window) & padding.unsqueeze(1)
            out = dense(q, k, v, scale=0.3, allowed=allowed, sinks=s)
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad, *([s.grad] if sinks else [])])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


def operators(**settings):
    q, k, v = (t.detach() for t in tensors(256, heads=4, kv_heads=2))
    with torch.profiler.profile() as profile:
        attend(q, k, v, scale=0.3, causal=True, **settings)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    "settings",
    [{}, {"sinks": torch.ones(4)}, {"window": 32}, {"window": 32, "sinks": torch.ones(4)},
     {"key_padding_mask": torch.ones(1, 256, dtype=torch.bool)}, {"document_ids": (torch.arange(256) // 100)[None]}],
    ids=lambda settings: "+".join(settings) or "plain",
)  # fmt: skip
def test_the_fused_kernel_serves_all_but_soft_cap_and_dropout(settings):
    names = operators(**settings)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
