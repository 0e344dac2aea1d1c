"""Training and evaluation batches: the same samples at every layout, each where it belongs."""

import math

import numpy as np
import pytest
import torch

from parallel_attn.data import IGNORE, EvalBatches, TokenFile, TrainBatches, sample_count
from parallel_attn.data.tokens import BYTES_DTYPE
from parallel_attn.errors import SettingsError

S = 4


@pytest.fixture
def tokens(tmp_path):
    """13 samples of 4 in 55 tokens; token i is i, so that a batch tells where it comes from."""

    def make(count=55) -> TokenFile:
        np.arange(count, dtype="<u2").tofile(tmp_path / "tokens.bin")
        return TokenFile(str(tmp_path / "tokens.bin"), "<u2", count, "", vocab_size=1000)

    return make


def train(tokens, degree=1, micro=1, global_batch=8, seed=3):
    return [
        TrainBatches(
            tokens,
            seq_len=S,
            global_batch_size=global_batch,
            micro_batch_size=micro,
            seed=seed,
            data_rank=rank,
            data_degree=degree,
        )
        for rank in range(degree)
    ]


def global_batch(replicas, step):
    """All rows of a step in the order of replicas, then micro batches."""
    return torch.cat([batch.tokens for replica in replicas for batch in replica.step(step)])


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_global_batch_is_the_same_at_every_layout(tokens, degree, micro):
    replicas = train(tokens(), degree, micro, global_batch=16)
    reference = train(tokens(), global_batch=16)
    for step in (0, 1, 2, 7):  # 13 samples: steps 0, 1, 2 ... cross the epoch's border
        batches = replicas[0].step(step)
        assert len(batches) == 16 // degree // micro and batches[0].tokens.shape == (micro, S)
        assert torch.equal(global_batch(replicas, step), global_batch(reference, step))


def test_an_epoch_covers_each_sample_once(tokens):
    replicas = train(tokens(), degree=2, micro=2, global_batch=4)
    first = torch.cat([global_batch(replicas, step) for step in range(13)])  # 52 rows are four epochs
    for epoch in range(4):
        starts = first[13 * epoch : 13 * epoch + 13, 0]
        assert sorted(starts.tolist()) == [S * sample for sample in range(13)]
    assert replicas[0].num_samples == 13 and replicas[0].epoch(13) == 4.0


def test_replicas_of_one_step_differ(tokens):
    left, right = train(tokens(), degree=2, micro=2)
    rows = [set(torch.cat([b.tokens for b in replica.step(0)])[:, 0].tolist()) for replica in (left, right)]
    assert len(rows[0]) == len(rows[1]) == 4 and not rows[0] & rows[1]


def test_targets_are_the_next_tokens(tokens):
    (replica,) = train(tokens(), micro=4)
    for batch in replica.step(1):
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.targets, batch.tokens + 1)  # also the last one, which lies behind the inputs


def test_steps_may_come_in_any_order(tokens):
    (one,), (other,) = train(tokens()), train(tokens())
    forwards = [global_batch([one], step) for step in range(9)]
    for step in reversed(range(9)):
        assert torch.equal(global_batch([other], step), forwards[step])


@pytest.mark.parametrize("count,samples", [(S - 1, 0), (S, 0), (S + 1, 1), (S + 2, 1), (2 * S, 1), (2 * S + 1, 2)])
def test_sample_count(count, samples):
    assert sample_count(count, S) == samples


def test_one_sample_is_enough(tokens):
    (replica,) = train(tokens(S + 1), global_batch=2, micro=2)
    assert replica.step(5)[0].tokens.tolist() == [[0, 1, 2, 3]] * 2
    assert replica.step(5)[0].targets.tolist() == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("total,micro,degree,works", [(8, 3, 1, 9), (6, 2, 2, 8), (2, 1, 4, 4), (0, 1, 1, 1)])
def test_batch_sizes_that_do_not_fit(tokens, total, micro, degree, works):
    with pytest.raises(SettingsError) as error:
        train(tokens(), degree, micro, total)
    message = str(error.value)
    assert message.startswith(f"train.global_batch_size={total}:") and f"{micro} x {degree}" in message
    assert message.endswith(f"{works} works")
    train(tokens(), degree, micro, works)


def test_a_context_has_no_targets_and_no_bytes(tmp_path, tokens):
    """In training and evaluation; the tokens themselves stay."""
    shapes = {"seq_len": S, "micro_batch_size": 2, "data_rank": 0, "data_degree": 1, "context": 3}
    (batch,) = TrainBatches(tokens(), global_batch_size=2, seed=3, **shapes).step(0)
    assert torch.equal(batch.tokens, train(tokens(), micro=2, global_batch=2)[0].step(0)[0].tokens)
    assert (batch.targets[:, :3] == IGNORE).all() and torch.equal(batch.targets[:, 3], batch.tokens[:, 3] + 1)
    np.full(55, 2, dtype=BYTES_DTYPE).tofile(tmp_path / "sizes.bin")
    counted = TokenFile(str(tmp_path / "tokens.bin"), "<u2", 55, "", vocab_size=1000, bytes_path=str(tmp_path / "sizes.bin"))
    for batch in EvalBatches(counted, samples=5, **shapes):
        valid = batch.targets != IGNORE
        assert not valid[:, :3].any() and torch.equal(batch.target_bytes, 2 * valid)


def evaluation(tokens, samples, degree=1, micro=1):
    return [
        EvalBatches(tokens, seq_len=S, samples=samples, micro_batch_size=micro, data_rank=rank, data_degree=degree)
        for rank in range(degree)
    ]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("samples,expected", [(1, 1), (5, 5), (7, 7), (13, 13), (1000, 13)])
def test_each_evaluation_sample_on_one_replica(tokens, degree, micro, samples, expected):
    replicas = evaluation(tokens(), samples, degree, micro)
    batches = [list(replica) for replica in replicas]
    assert len({len(replica) for replica in batches}) == 1  # collectives line up
    assert len(batches[0]) == len(replicas[0]) == math.ceil(math.ceil(expected / degree) / micro)
    seen, valid = [], 0
    for batch in (batch for replica in batches for batch in replica):
        assert batch.tokens.shape == batch.targets.shape == (micro, S)
        for inputs, targets in zip(batch.tokens, batch.targets, strict=True):
            if (targets == IGNORE).all():
                assert (inputs == 0).all()
                continue
            assert torch.equal(targets, inputs + 1)
            seen.append(int(inputs[0]) // S)
            valid += S
    assert seen == list(range(expected)) and valid == expected * S


def test_evaluation_twice_gives_the_same(tokens):
    (replica,) = evaluation(tokens(), 5, micro=2)
    first, second = list(replica), list(replica)
    assert len(first) == 3 and all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("samples,micro,key", [(0, 1, "eval.samples=0"), (4, 0, "train.micro_batch_size=0")])
def test_evaluation_refuses(tokens, samples, micro, key):
    with pytest.raises(SettingsError, match=key):
        evaluation(tokens(), samples, micro=micro)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_replica_outside_the_axis(tokens, rank):
    with pytest.raises(ValueError, match=f"data_rank={rank}"):
        EvalBatches(tokens(), seq_len=S, samples=1, micro_batch_size=1, data_rank=rank, data_degree=2)
