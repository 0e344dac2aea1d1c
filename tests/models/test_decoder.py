import math

import pytest
import torch

from parallel_attn import AxisGroup, DecoderLM, GroupedQueryAttention, ModelConfig, SettingsError, costs
from parallel_attn.attention import GroupedConfig
from parallel_attn.models import MlpConfig
from parallel_attn.nn import IGNORE
from parallel_attn.planning.parity import BOUNDS
from tests.parity import check, compare, world_axis
from tests.world import run


def small(axis, *, dtype=torch.float64, tie=False, heads=6, kv_heads=2, zero_centered=False, **model):
    config = ModelConfig(24, 2, heads, MlpConfig(20), tie_embeddings=tie, norm_zero_centered=zero_centered, vocab_size=11)
    attention = GroupedConfig(heads, num_kv_heads=kv_heads, head_dim=4, qk_norm="head", bias="all")
    return DecoderLM(config, GroupedQueryAttention, attention, tensor_parallel=axis, dtype=dtype, **model)


TOKENS = torch.tensor([[0, 10, 3, 3, 7, 9], [5, 6, 7, 0, 1, 2]])
TARGETS = torch.tensor([[10, 3, 3, 7, 9, IGNORE], [6, 7, 0, 1, 2, 5]])


def parity_case(settings, loss_settings):
    def loss_of(model, _):
        return model(TOKENS, TARGETS, **loss_settings)

    found = compare(lambda axis: small(axis, **settings), loss_of, [], rate=0.005)
    check(found, BOUNDS[settings.get("dtype", torch.float64)])


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_whole_model_equals_one_process(degree, tie):
    """Loss, every gradient, their norm and the weights after three steps; 11 tokens, 2 KV heads, width 20."""
    loss_settings = {"label_smoothing": 0.1, "z_loss": 0.01} if tie else {}
    run(degree, parity_case, {"tie": tie, "zero_centered": not tie}, loss_settings)


def test_whole_model_in_float32_at_degree_six():
    run(6, parity_case, {"dtype": torch.float32, "kv_heads": 3}, {})


def initial_case():
    model = small(world_axis(), dtype=torch.float32)
    logits = model(TOKENS).detach()
    assert logits.shape == (2, 6, 11)
    return logits, model(TOKENS, TARGETS).item(), costs.full_parameters(model), costs.local_parameters(model)


def test_initial_model_and_parameter_count_do_not_depend_on_the_degree():
    (logits, loss, full, local), = run(1, initial_case)
    assert full == local
    for degree in (2, 3, 4):
        results = run(degree, initial_case)
        for sharded_logits, sharded_loss, sharded_full, sharded_local in results:
            torch.testing.assert_close(sharded_logits, logits, rtol=1e-5, atol=1e-6)
            assert abs(sharded_loss - loss) < 1e-4 and sharded_full == full and sharded_local < full


def test_a_new_model_starts_near_the_uniform_loss():
    config = ModelConfig(vocab_size=257)
    model = DecoderLM(config, GroupedQueryAttention, GroupedConfig(8))
    tokens = torch.randint(0, 257, (4, 65), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], tokens[:, 1:]).item() / 256
    assert abs(loss - math.log(257)) < 0.06  # not log of a padded vocabulary


def test_loss_is_a_sum_that_splits_over_micro_batches():
    model = small(AxisGroup())
    whole = model(TOKENS, TARGETS)
    parts = model(TOKENS[:1], TARGETS[:1]) + model(TOKENS[1:], TARGETS[1:])
    torch.testing.assert_close(whole, parts)
    assert model(TOKENS, torch.full_like(TARGETS, IGNORE)).item() == 0.0


def test_layers_never_start_identical():
    model = small(AxisGroup())
    assert not torch.equal(model.layers[0].attention.q.weight, model.layers[1].attention.q.weight)
    alone = [GroupedQueryAttention(16, num_heads=4) for _ in range(2)]
    assert not torch.equal(alone[0].q.weight, alone[1].q.weight)
    named = [GroupedQueryAttention(16, num_heads=4, name="a", seed=3) for _ in range(2)]
    assert torch.equal(named[0].q.weight, named[1].q.weight)


@pytest.mark.parametrize(
    "size, millions", [("nano", 0.82), ("tiny", 9.08), ("small", 59.4), ("medium", 346.6), ("large", 1290.9)]
)
def test_presets_have_the_sizes_that_the_readme_states(size, millions):
    from parallel_attn.training import parse
    from tests.training.composed import composed

    config = parse(composed(f"model={size}", "model.vocab_size=257"))
    model = DecoderLM(config.model, config.attention.cls, config.attention.config, device="meta")
    assert costs.full_parameters(model) / 1e6 == pytest.approx(millions, rel=0.005)
    assert config.attention.config.num_heads >= 8


def test_output_projections_are_scaled_with_depth():
    def std(layers):
        config = ModelConfig(64, layers, 8, MlpConfig(256), vocab_size=11)
        block = DecoderLM(config, GroupedQueryAttention, GroupedConfig(8)).layers[0]
        return block.attention.o.weight.std().item(), block.mlp.down.weight.std().item()

    for shallow, deep, fan_in in zip(std(2), std(8), (64, 256)):
        assert deep / shallow == pytest.approx(0.5, rel=0.01)
        assert shallow == pytest.approx((2 * 2) ** -0.5 * fan_in**-0.5, rel=0.05)


def test_tied_embeddings_are_one_parameter():
    model = small(AxisGroup(), tie=True)
    assert model.head.weight is model.embedding.weight
    assert costs.full_parameters(small(AxisGroup())) - costs.full_parameters(model) == 11 * 24
    model.to(torch.float32)
    assert model.head.weight is model.embedding.weight


def test_bf16_compute_keeps_fp32_parameters_and_loss():
    model = small(AxisGroup(), dtype=torch.float32, compute_dtype=torch.bfloat16)
    loss = model(TOKENS, TARGETS)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    exact = small(AxisGroup(), dtype=torch.float32)(TOKENS, TARGETS)
    assert abs(loss.item() - exact.item()) < 0.01 * exact.item()


@pytest.mark.parametrize(
    "model, attention, message",
    [
        ({"vocab_size": None}, {}, "model.vocab_size=null"),
        ({}, {"causal": False}, "attention.causal=false"),
        ({}, {"num_kv_heads": 3}, "attention.num_kv_heads=3 does not divide attention.num_heads=8"),
        ({"hidden_size": 100}, {}, "attention.num_heads=8 does not divide model.hidden_size=100: set attention.head_dim"),
        ({"num_layers": 0}, {}, "model.num_layers=0"),
        ({"norm_eps": 0.0}, {}, "model.norm_eps=0.0"),
        ({}, {"bias": "some"}, "attention.bias=some is not one of: none, qkv, all"),
        ({}, {"head_dim": 0}, "attention.head_dim=0"),
        ({}, {"qk_norm": "layer"}, "attention.qk_norm=layer is not one of: none, head, full"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(model, attention, message):
    with pytest.raises(SettingsError, match=message):
        DecoderLM(
            ModelConfig(**{"vocab_size": 257} | model),
            GroupedQueryAttention,
            GroupedConfig(**{"num_heads": 8} | attention),
            device="meta",
        )


@pytest.mark.parametrize("key, degree, settings", [("model.vocab_size", 12, {}), ("model.mlp.hidden_size", 21, {"heads": 24})])
def test_widths_below_the_degree_are_refused_on_paper(key, degree, settings):
    with pytest.raises(SettingsError, match=f"{key}=.* is less than parallel.tensor={degree}"):
        axis = AxisGroup(None, 0, degree)
        config = ModelConfig(24, 1, 24, MlpConfig(20), vocab_size=11 if "vocab" in key else 257)
        DecoderLM(config, GroupedQueryAttention, GroupedConfig(24, head_dim=4), tensor_parallel=axis, device="meta")


def test_training_flops_of_the_formula():
    model = small(AxisGroup())
    block = 24 * 24 * 2 + 2 * 24 * 8 + 3 * 24 * 20
    core = 2 * 6 * (4 + 4)
    assert costs.train_flops_per_token(model, 9) == 6 * (2 * block + 24 * 11) + 3 * 2 * core * 5
