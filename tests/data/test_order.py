"""The order of samples is one, whatever the layout."""

import numpy as np
import pytest

from parallel_attn.data import SampleOrder
from parallel_attn.errors import SettingsError


def test_each_sample_once_per_epoch():
    order = SampleOrder(37, seed=5)
    epochs = [order.samples(37 * epoch, 37 * epoch + 37) for epoch in range(4)]
    for samples in epochs:
        assert sorted(samples) == list(range(37))
    assert len({tuple(samples) for samples in epochs}) == 4  # each epoch its own shuffle
    assert list(epochs[0]) != list(range(37))


def test_pieces_of_any_size_give_the_same_order():
    whole = SampleOrder(10, seed=1).samples(0, 95)  # crosses nine borders
    for size in (1, 3, 10, 25):
        order = SampleOrder(10, seed=1)
        pieces = [order.samples(at, min(at + size, 95)) for at in range(0, 95, size)]
        assert np.array_equal(np.concatenate(pieces), whole)
    order = SampleOrder(10, seed=1)
    backwards = [order.samples(at, at + 5) for at in reversed(range(0, 95, 5))]
    assert np.array_equal(np.concatenate(backwards[::-1]), whole)


def test_only_current_shuffles_are_kept():
    order = SampleOrder(10, seed=1)
    order.samples(0, 35)
    order.samples(38, 42)
    assert sorted(order._shuffles) == [3, 4]


def test_seed_and_epoch_do_not_stand_in_for_one_another():
    assert list(SampleOrder(50, seed=0).samples(50, 100)) != list(SampleOrder(50, seed=1).samples(0, 50))
    big = 2**32 + 1  # wider than one word of the generator's seed
    assert list(SampleOrder(50, seed=big).samples(0, 50)) != list(SampleOrder(50, seed=1).samples(50, 100))


def test_the_order_stays_what_it_was():
    """Frozen: a run that resumes under a newer version of this package or of NumPy must go on in the same order."""
    assert SampleOrder(8, seed=1234).samples(4, 14).tolist() == [5, 7, 2, 3, 3, 6, 2, 1, 5, 4]


def test_negative_seed_is_refused():
    with pytest.raises(SettingsError, match=r"train\.seed=-3"):
        SampleOrder(8, seed=-3)
