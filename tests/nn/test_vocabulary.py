"""Embedding and cross entropy on vocabulary shards against torch's own on the whole vocabulary."""

import math

import pytest
import torch
from torch.nn import functional as F

from parallel_attn import AxisGroup
from parallel_attn.nn import IGNORE, Placement, VocabParallelEmbedding, vocab_parallel_cross_entropy
from parallel_attn.planning.parity import BOUNDS
from parallel_attn.sharding import split_evenly
from tests.parity import check, compare, world_axis
from tests.world import CaseFailed, run

VOCABULARY = 11  # divides by none of 2, 3, 4


def reference(logits, targets, smoothing, z_loss):
    valid = targets != IGNORE
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, label_smoothing=smoothing, reduction="none")
    return loss + z_loss * torch.logsumexp(logits, -1).square() * valid


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, VOCABULARY, generator=generator, dtype=torch.float64) * 3
    targets = torch.tensor([0, 10, IGNORE, 3, 5, 6, IGNORE])
    return logits.to(dtype), targets


def loss_case(smoothing, z_loss):
    axis = world_axis()
    ranges = split_evenly(VOCABULARY, axis.degree)
    start, stop = ranges[axis.rank]
    full, targets = inputs()
    logits = full[:, start:stop].clone().requires_grad_()
    before = logits.detach().clone()
    losses = vocab_parallel_cross_entropy(logits, targets, axis, ranges, label_smoothing=smoothing, z_loss=z_loss)
    weights = torch.arange(1.0, 8.0, dtype=torch.float64)
    (losses * weights).sum().backward()
    assert torch.equal(logits.detach(), before), "the caller's logits were written to"
    full.requires_grad_()
    wanted = reference(full, targets, smoothing, z_loss)
    (wanted * weights).sum().backward()
    torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits.grad, full.grad[:, start:stop], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.05)])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_loss_and_gradient_over_the_whole_vocabulary(degree, smoothing, z_loss):
    run(degree, loss_case, smoothing, z_loss)


def test_bfloat16_logits_are_reduced_in_float32():
    logits, targets = inputs(torch.bfloat16)
    got = vocab_parallel_cross_entropy(logits, targets, AxisGroup(), ((0, VOCABULARY),))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference(logits.float(), targets, 0.0, 0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", [-1, VOCABULARY, 1000])
def test_a_target_outside_the_vocabulary_is_no_silent_loss(target):
    logits, targets = inputs()
    targets[3] = target
    with pytest.raises(RuntimeError, match="a target is outside the vocabulary"):
        vocab_parallel_cross_entropy(logits, targets, AxisGroup(), ((0, VOCABULARY),))


def test_a_second_derivative_of_the_loss_is_refused():
    logits, targets = inputs()
    loss = vocab_parallel_cross_entropy(logits.requires_grad_(), targets, AxisGroup(), ((0, VOCABULARY),)).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_only_ignored_targets_give_zero_and_no_gradient_even_beside_nan():
    logits = torch.full((3, 5), math.nan, requires_grad=True)
    targets = torch.full((3,), IGNORE)
    loss = vocab_parallel_cross_entropy(logits, targets, AxisGroup(), ((0, 5),), label_smoothing=0.1, z_loss=0.1).sum()
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(logits.grad, torch.zeros(3, 5))


def test_a_banned_token_does_not_spoil_the_loss():
    logits = torch.zeros(1, 4)
    logits[0, 3] = -math.inf
    got = vocab_parallel_cross_entropy(logits, torch.tensor([0]), AxisGroup(), ((0, 4),))
    torch.testing.assert_close(got, torch.tensor([math.log(3)]))


def embedding_case(degree):
    tokens = torch.tensor([[0, 10, 3, 3], [5, 6, 7, 0]])

    def build(axis):
        return VocabParallelEmbedding(Placement(axis, "e", 0, None, torch.float64), VOCABULARY, 6)

    check(compare(build, lambda m, inputs: m(inputs[0]), [tokens]), BOUNDS[torch.float64])


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_embedding_with_uneven_rows(degree):
    run(degree, embedding_case, degree)


def outside_case(token):
    VocabParallelEmbedding(Placement(world_axis(), "e"), VOCABULARY, 6)(torch.tensor([[token]]))


@pytest.mark.parametrize("token", [VOCABULARY, -1])
@pytest.mark.parametrize("degree", [1, 2])
def test_an_id_that_no_rank_holds_is_not_silently_zero(degree, token):
    with pytest.raises(CaseFailed, match="outside the vocabulary"):
        run(degree, outside_case, token)
