"""A layer in somebody else's training loop: autocast, inference mode, copies, second derivatives, no names."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel_attn import CrossAttention, GroupedQueryAttention, SettingsError
from parallel_attn.planning.parity import set_parameters
from tests.parity import world_axis
from tests.world import run


def layer(axis=None, name="a", **settings):
    settings = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "bias": "all", "qk_norm": "none"} | settings
    return GroupedQueryAttention(24, tensor_parallel=axis, name=name, **settings)


def autocast_case():
    module = layer(world_axis(), qk_norm="full")
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    exact = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("degree", [1, 2])
def test_under_autocast(degree):
    run(degree, autocast_case)


def test_inference_mode_does_not_poison_training():
    module = layer()
    x = torch.randn(1, 4, 24)
    with torch.inference_mode():
        module(x)
    module(x).sum().backward()


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["no sample", "no token"])
@pytest.mark.parametrize("settings", [{}, {"window": 2, "sinks": True}, {"dropout": 0.1, "soft_cap": 2.0}], ids=["plain", "window", "explicit"])
@pytest.mark.parametrize("documents", [False, True])
def test_nothing_at_all_is_an_input(shape, settings, documents):
    module, x = layer(**settings), torch.randn(*shape, 24, requires_grad=True)
    given = {"document_ids": torch.zeros(shape, dtype=torch.long)} if documents else {}
    y = module(x, samples=torch.arange(shape[0]), step=0, **given)
    y.sum().backward()
    assert y.shape == x.shape and x.grad.shape == x.shape and not module.q.weight.grad.any()


@pytest.mark.parametrize(
    "name, shape",
    [("samples", (1,)), ("document_ids", (2, 4)), ("document_ids", (3, 5)), ("key_padding_mask", (2, 1)), ("positions", (1,))],
)
def test_what_could_be_broadcast_or_cut_short_is_refused(name, shape):
    given = {"samples": torch.arange(2), "step": 0}
    given[name] = torch.zeros(shape, dtype=torch.bool if "mask" in name else torch.long)
    with pytest.raises(ValueError, match=name):
        layer(dropout=0.1)(torch.randn(2, 5, 24), **given)


def test_a_dry_run_with_fake_tensors_leaves_nothing_behind():
    module, x = layer(), torch.randn(1, 4, 24)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(mode.from_tensor(x)).shape == x.shape
    assert torch.equal(module(x), layer()(x))


def second_derivative_case():
    """A penalty on the input gradient, against one process; the unfused kernel, which alone has second derivatives."""
    x = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for axis in (world_axis(), None):
        module = layer(axis, dtype=torch.float64)
        set_parameters(module)
        fed = x.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            (first,) = torch.autograd.grad(module(fed).square().sum(), fed, create_graph=True)
            first.square().sum().backward()
        found.append((fed.grad, module.o.bias.grad))
    for got, wanted in zip(*found):
        assert (got - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("degree", [2, 3])
def test_second_derivatives_are_right(degree):
    run(degree, second_derivative_case)


def test_second_derivatives_through_a_norm_are_refused():
    module = layer(qk_norm="head")
    x = torch.randn(1, 3, 24, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def copies_case():
    module = layer(world_axis())
    twin = copy.deepcopy(module)
    x = torch.ones(1, 3, 24)
    assert torch.equal(twin(x), module(x)) and twin.q.weight is not module.q.weight
    twin.load_state_dict(module.state_dict())
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(module)


def test_a_deep_copy_stands_on_the_same_ranks():
    run(2, copies_case)
    assert pickle.loads(pickle.dumps(layer())).plan.degree == 1


def nameless_case():
    if dist.get_rank() == 0:
        layer(None, name=None)  # a helper that only one rank builds
    module = layer(world_axis(), name=None, num_kv_heads=1)
    return module.k.weight.detach()


def test_a_layer_that_one_rank_builds_alone_shifts_no_names():
    first, second = run(2, nameless_case)
    assert torch.equal(first, second)


def repr_case():
    return repr(layer(world_axis()))


def test_print_shows_the_sharding():
    assert "weight (48, 24)" in repr(layer())
    assert run(2, repr_case)[0].count("weight (48, 24) -> (24, 24) here") == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rope": {"thetta": 1}}, "attention.rope has no .'thetta'."),
        ({"rope": None}, "attention.rope=None"),
        ({"rope": {"fraction": "half"}}, "attention.rope.fraction='half' must be a number"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 must be positive and finite"),
        ({"num_heads": 8.0}, "attention.num_heads=8.0 must be a whole number"),
        ({"rope": {"theta": float("nan")}}, "attention.rope.theta=nan"),
        ({"heads": 8}, "attention.heads is not a setting"),
    ],
)
def test_settings_of_the_wrong_kind(settings, message):
    with pytest.raises(SettingsError, match=message):
        layer(**settings)
    with pytest.raises(SettingsError, match="memory_size=0 must be a whole number, at least 1"):
        CrossAttention(24, num_heads=4, memory_size=0)
    with pytest.raises(SettingsError, match="config=8 is not a GroupedConfig"):
        GroupedQueryAttention(64, 8)
