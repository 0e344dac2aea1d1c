"""The loop: the same tokens at every degree, in every batch and on every rank; where it stops."""

import pytest
import torch
import torch.distributed as dist

from parallel_attn import AxisGroup, SettingsError
from parallel_attn.models import Sampling, generate
from tests.models.test_caches import KINDS, TOKENS, VOCABULARY, decoder
from tests.models.test_encoder_decoder import small as encoder_decoder
from tests.parity import world_axis
from tests.world import run

PROMPTS = [TOKENS[0, :3].tolist(), TOKENS[1, :7].tolist(), TOKENS[2, :12].tolist()]
SETTINGS = {"seq_len": 40, "max_new_tokens": 12}
SAMPLED = Sampling(temperature=2.0, top_k=9, top_p=0.95, seed=3)


def tokens_of(made):
    return [row.tokens for row in made.continuations]


def without_cache(model, prompt, count, sampling, number):
    """Tokens by a whole forward each."""
    ids = list(prompt)
    for position in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[:, -1]
        ids.append(sampling.pick(logits, [number], position).item())
    return ids[len(prompt) :]


def degree_case(kind, sampling):
    torch.manual_seed(dist.get_rank())  # what a rank's own generator does must not matter
    return tokens_of(generate(decoder(kind, world_axis()), PROMPTS, sampling=sampling, **SETTINGS))


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_degrees_and_caches_give_the_same_tokens(kind, sampling):
    model = decoder(kind)
    together = tokens_of(generate(model, PROMPTS, sampling=sampling, **SETTINGS))
    for number, prompt in enumerate(PROMPTS):
        assert tokens_of(generate(model, [prompt], sampling=sampling, numbers=[number], **SETTINGS)) == [together[number]]
        assert without_cache(model, prompt, 12, sampling, number) == together[number]
    for degree in (2, 4) if kind in ("gqa", "mla") else (2,):
        assert run(degree, degree_case, kind, sampling) == [together] * degree


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gqa", "window", "mla"])
def test_compiled_gives_the_same_tokens(kind, monkeypatch):
    """Traced, not built (the built kernels are torch's own): also a second batch, whose caches have other sizes."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: compiler(function, backend="eager", **given))
    torch._dynamo.reset()  # it gives up after a few versions of one function, whatever the model
    model = decoder(kind)
    for prompts, sampling in ((PROMPTS, Sampling()), (PROMPTS[1:2], SAMPLED)):
        given = SETTINGS | {"sampling": sampling}
        wanted = tokens_of(generate(model, prompts, **given))
        assert tokens_of(generate(model, prompts, compiled=True, **given)) == wanted
    if kind in ("gqa", "mla"):
        assert run(2, compiled_case, kind, timeout=120) == [tokens_of(generate(model, PROMPTS, **SETTINGS))] * 2


def compiled_case(kind):
    compiler = torch.compile
    torch.compile = lambda function, **given: compiler(function, backend="eager", **given)
    try:
        return tokens_of(generate(decoder(kind, world_axis()), PROMPTS, compiled=True, **SETTINGS))
    finally:
        torch.compile = compiler


def test_calls_do_not_see_each_other():
    model = decoder("gqa")
    first = tokens_of(generate(model, PROMPTS[:1], **SETTINGS))
    generate(model, PROMPTS[1:], sampling=SAMPLED, **SETTINGS)
    assert tokens_of(generate(model, PROMPTS[:1], **SETTINGS)) == first
    assert tokens_of(generate(decoder("gqa"), PROMPTS[1:], **SETTINGS)) == tokens_of(generate(model, PROMPTS[1:], **SETTINGS))


def test_dropout_is_off_and_training_comes_back():
    model = decoder("gqa").train()  # this one has attention.dropout=0.3
    assert tokens_of(generate(model, PROMPTS, **SETTINGS)) == tokens_of(generate(model, PROMPTS, **SETTINGS))
    assert model.training


def test_each_row_stops_for_its_own_reason():
    model = decoder("gqa")
    whole = tokens_of(generate(model, PROMPTS, **SETTINGS))
    end = whole[1][4]
    told = []
    made = generate(model, PROMPTS, end_of_text=end, on_tokens=told.append, **SETTINGS)
    for row, tokens in zip(made.continuations, whole):
        stop = tokens.index(end) if end in tokens else 12
        assert (row.tokens, row.reason) == (tokens[:stop], "end of text" if end in tokens else "max_new_tokens")
    for number, row in enumerate(made.continuations):
        assert [tokens[number] for tokens in told if tokens[number] is not None] == row.tokens
    # past the longest sequence: a clear stop, each row at its own
    short = generate(model, PROMPTS, seq_len=13, max_new_tokens=8)
    assert [(len(row.tokens), row.reason) for row in short.continuations] == [
        (8, "max_new_tokens"), (6, "length"), (1, "length"),
    ]  # fmt: skip
    assert [row.tokens for row in short.continuations] == [tokens[:n] for tokens, n in zip(whole, (8, 6, 1))]
    assert generate(model, [TOKENS[0, :13].tolist()], seq_len=13, max_new_tokens=8).continuations[0].tokens == []
    assert tokens_of(generate(model, PROMPTS, seq_len=40, max_new_tokens=0)) == [[], [], []]


def replicas_case():
    """Replica 0 meets its end of text at once, replica 1 never does; neither waits for the other."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replica = rank // 2
    model = decoder("gqa", AxisGroup(groups[replica], rank % 2, 2))
    first = generate(model, PROMPTS[:1], seq_len=40, max_new_tokens=1).continuations[0].tokens[0]
    prompt, end = (PROMPTS[0], first) if replica == 0 else (PROMPTS[1], VOCABULARY + 1)
    row = generate(model, [prompt], seq_len=40, max_new_tokens=25, end_of_text=end).continuations[0]
    dist.barrier()
    return len(row.tokens), row.reason


def test_replicas_that_stop_apart_do_not_wait():
    assert run(4, replicas_case) == [(0, "end of text")] * 2 + [(25, "max_new_tokens")] * 2


def test_tokens_that_the_tokenizer_lacks_never_come_out():
    model = decoder("gqa")
    sampling = Sampling(temperature=50.0, seed=1)
    made = generate(model, [[1, 2]], seq_len=100, max_new_tokens=80, vocab_size=7, sampling=sampling)
    assert set(made.continuations[0].tokens) == set(range(7))


def test_an_encoder_decoder_goes_on_from_its_prompt():
    model = encoder_decoder(None, read=5).eval()
    prompts = [[1, 2, 3], [5, 4, 3, 2, 1, 0]]
    made = generate(model, prompts, seq_len=9, max_new_tokens=20)
    assert [(len(row.tokens), row.reason) for row in made.continuations] == [(3, "length"), (3, "length")]
    for prompt, row in zip(prompts, made.continuations):
        assert tokens_of(generate(model, [prompt], seq_len=9, max_new_tokens=20)) == [row.tokens]
    with pytest.raises(SettingsError, match="give 2 to 6"):
        generate(model, [[1]], seq_len=9, max_new_tokens=2)


@pytest.mark.parametrize(
    "prompts, settings, message",
    [
        ([[]], {}, "no token"),
        ([[1] * 41], {}, "it has 41 tokens, the model's longest sequence 40"),
        ([[1, 13]], {}, "token id 13 is not in the vocabulary of 13"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([[1]], {"sampling": Sampling(top_k=14)}, "top_k=14 is above the vocabulary of 13"),
    ],
)
def test_what_cannot_be_generated_from(prompts, settings, message):
    with pytest.raises(SettingsError, match=message):
        generate(decoder("gqa"), prompts, **SETTINGS | settings)
