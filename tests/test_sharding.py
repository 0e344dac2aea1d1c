import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_attn import HeadPlan, ParameterShard, SettingsError
from parallel_attn.sharding import split_evenly

PLANS = st.integers(1, 12).flatmap(
    lambda kv: st.integers(1, 6).flatmap(
        lambda group: st.integers(1, kv * group).map(lambda degree: HeadPlan(kv * group, kv, degree))
    )
)


@given(PLANS)
def test_every_query_head_is_on_one_rank_beside_its_kv_head(plan):
    owner = {}
    for rank, ((start, stop), (kv_start, kv_stop)) in enumerate(zip(plan.query_heads, plan.kv_heads)):
        assert stop > start and kv_stop > kv_start
        for head in range(start, stop):
            assert head not in owner
            owner[head] = rank
            assert kv_start <= head // plan.group_size < kv_stop
        # the local attention is an ordinary GQA: local query head i uses local KV head i // (H_local / K_local)
        group = (stop - start) // (kv_stop - kv_start)
        assert (stop - start) % (kv_stop - kv_start) == 0
        assert all((start + i) // plan.group_size == kv_start + i // group for i in range(stop - start))
    assert sorted(owner) == list(range(plan.num_heads))


@given(PLANS)
def test_spread_is_as_even_as_whole_groups_allow(plan):
    if plan.num_kv_heads >= plan.degree:
        counts = [stop - start for start, stop in plan.kv_heads]
        assert all(len(plan.holders(rank)) == 1 for rank in range(plan.degree))
    else:
        counts = [len(plan.holders(plan.kv_heads.index((head, head + 1)))) for head in range(plan.num_kv_heads)]
        for rank in range(plan.degree):
            holders = plan.holders(rank)
            assert holders == tuple(range(holders[0], holders[-1] + 1))
            shares = [plan.query_heads[r][1] - plan.query_heads[r][0] for r in holders]
            assert max(shares) - min(shares) <= 1
        assert sum(plan.owns_kv(rank) for rank in range(plan.degree)) == plan.num_kv_heads
    assert max(counts) - min(counts) <= 1
    assert plan.imbalance >= 1 - 1e-12


def test_imbalance_of_nine_groups_on_eight_ranks():
    assert HeadPlan(36, 9, 8).imbalance == pytest.approx(8 * 8 / 36)  # two groups of four on the fullest rank: 1.78
    assert HeadPlan(8, 2, 4).imbalance == 1.0


def test_the_table_shows_ranks_heads_copies_and_imbalance():
    text = str(HeadPlan(8, 2, 3))
    assert "8 query heads, 2 KV heads on 3 ranks: imbalance 1.50" in text
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["0", "0-1", "(2)", "0", "2"],
        ["1", "2-3", "(2)", "0", "2"],
        ["2", "4-7", "(4)", "1", "1"],
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((8, 3, 1), "attention.num_kv_heads=3 does not divide attention.num_heads=8: use one of 1, 2, 4, 8"),
        ((4, 2, 5), "parallel.tensor=5 exceeds attention.num_heads=4"),
        ((0, 1, 1), "attention.num_heads=0"),
        ((8, 0, 1), "attention.num_kv_heads=0"),
    ],
)
def test_heads_that_cannot_work_are_refused_by_name(arguments, message):
    with pytest.raises(SettingsError, match=message.replace(".", r"\.")):
        HeadPlan(*arguments)


@given(st.integers(1, 50), st.integers(1, 50))
def test_split_evenly_covers_without_gap(total, parts):
    if total < parts:
        with pytest.raises(SettingsError, match="parallel.tensor"):
            split_evenly(total, parts)
        return
    ranges = split_evenly(total, parts)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_record_of_copies():
    shards = [ParameterShard((4, 6), 0, ((0, 2), (0, 2), (2, 4)), rank, 3) for rank in range(3)]
    assert [shard.holders for shard in shards] == [(0, 1), (0, 1), (2,)]
    assert [shard.first_holder for shard in shards] == [True, False, True]
    assert shards[0].writers == (0, 2)
    assert shards[2].local_shape() == (2, 6) and shards[2].local_shape(0) == (2, 6)
    assert shards[2].index() == (slice(2, 4),)


def test_record_of_a_replicated_parameter_counts_once():
    shards = [ParameterShard.replicated((5,), rank, 3) for rank in range(3)]
    assert [shard.first_holder for shard in shards] == [True, False, False]
    assert shards[1].local_shape() == (5,) and shards[1].full_elements() == 5


@pytest.mark.parametrize("ranges", [((0, 2), (3, 4)), ((0, 2), (1, 4)), ((0, 2), (2, 3)), ((0, 4), (4, 4))])
def test_ranges_with_gaps_or_overlaps_are_no_record(ranges):
    with pytest.raises(ValueError):
        ParameterShard((4,), 0, ranges, 0, 2)
