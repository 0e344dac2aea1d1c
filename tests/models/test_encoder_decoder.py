"""The encoder-decoder model: parity over degrees, what may see what, padding, the memory's gradient, costs."""

import pytest
import torch

from parallel_attn import AxisGroup, CrossAttention, EncoderDecoderConfig, EncoderDecoderLM, GroupedQueryAttention
from parallel_attn import MultiHeadLatentAttention, SettingsError, costs
from parallel_attn.attention import CrossConfig, GroupedConfig, LatentConfig
from parallel_attn.models import EncoderConfig, EncoderMlpConfig, MlpConfig
from parallel_attn.nn import IGNORE
from parallel_attn.planning import mutants
from parallel_attn.planning.parity import bounds_of, set_parameters
from tests.parity import check, compare
from tests.world import run

TOKENS = torch.tensor([[0, 10, 3, 3, 7, 9, 1, 4, 4], [5, 6, 7, 0, 1, 2, 8, 8, 3]])
TARGETS = torch.tensor([[10, 3, 3, 7, 9, 1, 4, 4, IGNORE], [6, 7, 0, 1, 2, 8, 8, 3, 5]])
PADDING = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
DROPOUT = {"samples": torch.tensor([3, 11]), "step": 5}


def small(axis, *, read=5, tie=False, attention=None, dropout=0.0, dtype=torch.float64, compute_dtype=None, encoder_size=18, **cross):
    """Decoder 24 wide with 2 layers, encoder 18 with 1; 6 query heads on 2 KV heads, 11 tokens."""
    config = EncoderDecoderConfig(
        24, 2, 6, MlpConfig(20), tie_embeddings=tie, vocab_size=11,
        encoder=EncoderConfig(encoder_size, 1, EncoderMlpConfig(14), read),
        cross_attention=CrossConfig(6, head_dim=4, dropout=dropout, **{"num_kv_heads": 2} | cross),
    )  # fmt: skip
    attention = attention or GroupedConfig(6, num_kv_heads=2, head_dim=4, qk_norm="head", bias="all", dropout=dropout)
    kind = MultiHeadLatentAttention if isinstance(attention, LatentConfig) else GroupedQueryAttention
    return EncoderDecoderLM(config, kind, attention, tensor_parallel=axis, dtype=dtype, compute_dtype=compute_dtype)


def parity(settings, given, **how):
    def loss_of(model, _):
        return model(TOKENS, TARGETS, **given)

    return compare(lambda axis: small(axis, **settings), loss_of, [], **how)


def parity_case(settings, given):
    check(parity(settings, given), bounds_of(settings.get("dtype", torch.float64), "model"))


VARIANTS = {
    "gated": ({"gate": "elementwise", "qk_norm": "full", "bias": "all"}, {"z_loss": 0.01}),
    "dropout-padding-tied": ({"dropout": 0.3, "tie": True}, {"encoder_padding_mask": PADDING, **DROPOUT}),
    "mla-mqa": (
        {"attention": LatentConfig(6, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2), "num_kv_heads": 1},
        {"label_smoothing": 0.1},
    ),
}


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_model_equals_one_process(degree, variant):
    """Loss, every gradient of encoder and decoder, their norm, the weights after three steps; degree 3 and 4 hold copies."""
    run(degree, parity_case, *VARIANTS[variant])


def test_whole_model_in_float32_with_a_wider_encoder():
    run(3, parity_case, {"dtype": torch.float32, "encoder_size": 30, "gate": "headwise"}, {})


def mistaken_gradients(mutant: str) -> dict[str, float]:
    return parity({}, {}, steps=1, mutation=mutants.applied(mutant)).gradients


@pytest.mark.parametrize("mutant", ["memory_gradient_not_summed", "memory_gradient_summed_twice"])
def test_the_gradient_of_the_encoder_states_is_summed_once(mutant):
    """A mistake there spoils every gradient of the encoder and leaves the decoder's right."""
    for errors in run(2, mistaken_gradients, mutant):
        for name, error in errors.items():
            assert error > 1e-3 if name.startswith("encoder.") else error < 1e-10, name


def test_who_may_see_whom():
    """The encoder sees its whole part, the decoder all of the encoder and its own past."""
    model = small(None)
    set_parameters(model)
    logits = model(TOKENS)
    assert logits.shape == (2, 4, 11)
    for place in range(9):
        changed = TOKENS.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        differs = (model(changed) - logits).abs().amax((0, 2)) > 1e-6
        assert differs.tolist() == [place < 5 or position >= place - 5 for position in range(4)]
    states = []
    model.encoder.register_forward_hook(lambda module, given, output: states.append(output))
    for tokens in (TOKENS, torch.cat([TOKENS[:, :4], TOKENS[:, :1], TOKENS[:, 5:]], 1)):
        model(tokens)
    assert ((states[0] - states[1]).abs().amax((0, 2)) > 1e-6).all(), "the first state must know of the last token"


def test_targets_of_the_encoders_tokens_count_nothing():
    model = small(None)
    hidden = TARGETS.clone()
    hidden[:, :5] = IGNORE
    assert model(TOKENS, TARGETS).item() == model(TOKENS, hidden).item() > 0
    parts = model(TOKENS[:1], TARGETS[:1]) + model(TOKENS[1:], TARGETS[1:])
    torch.testing.assert_close(model(TOKENS, TARGETS), parts)
    assert small(None, read=None).context_tokens(9) == 4


def test_padding_has_no_gradient_and_its_length_does_not_matter():
    """Token 2 fills the padded slots, even with a row of NaN in the encoder's table."""
    first, last = TOKENS[:, :3], TOKENS[:, 5:]
    results = []
    for padded in (0, 2, 6):
        model = small(None, read=3 + padded, gate="headwise", bias="all")
        set_parameters(model)
        with torch.no_grad():
            model.encoder.embedding.weight[2] = torch.nan if padded else 0.0
        filled = torch.full((2, padded), 2)
        tokens = torch.cat([first, filled, last], 1)
        mask = torch.arange(3 + padded).expand(2, -1) < 3
        loss = model(tokens, tokens.roll(-1, 1), encoder_padding_mask=mask)
        loss.backward()
        assert (model.encoder.embedding.weight.grad[2] == 0).all()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_dropout_differs_between_encoder_decoder_and_cross_attention_and_ends_with_training():
    model = small(None, dropout=0.5)
    layers = [model.encoder.layers[0].attention, model.layers[0].attention, model.layers[0].cross_attention]
    masks = [layer.dropout(DROPOUT["samples"], 5).block(0, 9, 0, 9, 9, 9).kept() for layer in layers]
    assert not any(torch.equal(masks[i], masks[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    with pytest.raises(ValueError, match="forward needs samples"):
        model(TOKENS)
    assert not torch.equal(model(TOKENS, **DROPOUT), model.eval()(TOKENS))


def test_bf16_compute_keeps_fp32_parameters_and_loss():
    exact = small(None, dtype=torch.float32)(TOKENS, TARGETS).item()
    model = small(None, dtype=torch.float32, compute_dtype=torch.bfloat16)
    loss = model(TOKENS, TARGETS)
    loss.backward()
    assert loss.dtype == torch.float32 and 0 < abs(loss.item() - exact) < 0.01 * exact
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_decoder_parameters_are_named_as_the_decoder_models():
    names = dict(small(None).named_parameters())
    assert {"layers.1.attention.q.weight", "layers.1.cross_attention.k.weight", "encoder.layers.0.mlp.up.weight"} <= set(names)
    assert names["layers.0.cross_attention.v.weight"].shape == (8, 18)
    config = EncoderDecoderConfig(vocab_size=11, encoder=EncoderConfig(hidden_size=64))
    assert config.encoder_model().mlp.hidden_size == 192 and config.encoder_model().num_layers == 4


def test_training_flops_of_the_formula():
    """9 tokens: 5 pass through the encoder and the key and value projections of the cross attention, 4 through the rest."""
    model = small(None)
    encoder = 18 * 24 * 2 + 2 * 18 * 8 + 3 * 18 * 14
    block = (24 * 24 * 2 + 2 * 24 * 8) + 2 * 24 * 24 + 3 * 24 * 20
    weights = 5 * (encoder + 2 * 2 * 18 * 8) + 4 * (2 * block + 24 * 11)
    core = 2 * 6 * (4 + 4)
    pairs = 5 * 5 + 2 * (4 * 5 / 2 + 4 * 5)
    assert costs.train_flops_per_token(model, 9) == round((6 * weights + 3 * core * pairs) / 9)
    assert model.cache_elements_per_token() == 2 * 2 * 8 == model.context_cache_elements_per_token()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 20])
def test_mean_keys_of_a_window(causal, window):
    layer = GroupedQueryAttention(8, num_heads=2, head_dim=4, causal=causal, window=window, name="a")
    distance = torch.arange(9).unsqueeze(1) - torch.arange(9)
    allowed = (distance.abs() < (window or 9)) & ((distance >= 0) if causal else True)
    assert layer.mean_keys(9, 5) == pytest.approx(allowed.sum().item() / 9)
    assert CrossAttention(8, num_heads=2, head_dim=4, name="a").mean_keys(9, 5) == 5


@pytest.mark.parametrize(
    "read, given, message",
    [
        (9, {}, "model.encoder.seq_len=9 leaves the decoder nothing of train.seq_len=9: use 1 to 8"),
        (5, {"document_ids": torch.zeros_like(TOKENS)}, "data.documents=true with model=encoder_decoder"),
    ],
)
def test_what_a_forward_refuses(read, given, message):
    with pytest.raises(SettingsError, match=message):
        small(AxisGroup(), read=read)(TOKENS, TARGETS, **given)
