"""Heads and single features of ranks: each is on a rank, in order, and none has much more than others."""

from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.parallel.shares import (
    Shard,
    over_replicas,
    share,
    share_of_groups,
    single_units,
)


def of_ranks(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


@given(st.integers(1, 100), st.integers(1, 16))
def test_units_are_in_order_and_even(units: int, size: int) -> None:
    found = [share(units, shard) for shard in of_ranks(size)]
    assert sorted({unit for own in found for unit in own}) == list(range(units))
    assert [own.start for own in found] == sorted(own.start for own in found)
    lengths = [len(own) for own in found]
    assert max(lengths) - min(lengths) <= 1
    assert sum(lengths) == max(units, size)


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_query_heads_are_on_one_rank_each_where_their_key_is(kv_heads: int, group: int, data: st.DataObject) -> None:
    heads = kv_heads * group
    size = data.draw(st.integers(1, min(heads, 16)))
    found = [share_of_groups(heads, kv_heads, shard) for shard in of_ranks(size)]
    assert [head for own in found for head in own] == list(range(heads))
    for own, shard in zip(found, of_ranks(size), strict=True):
        assert own
        assert {head // group for head in own} == set(share(kv_heads, shard))
    assert max(map(len, found)) <= group * -(-kv_heads // size)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 64))
def test_each_expert_is_on_one_rank_of_one_replica(num_replicas: int, size: int, more: int) -> None:
    num = num_replicas * size + more
    all_ranks = [over_replicas(one, replica) for replica in of_ranks(num_replicas) for one in of_ranks(size)]
    found = [share(num, one) for one in all_ranks]
    assert [expert for own in found for expert in own] == list(range(num))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_known_divisions() -> None:
    assert [len(share_of_groups(28, 4, shard)) for shard in of_ranks(8)] == [3, 4] * 4
    assert [len(share_of_groups(32, 8, shard)) for shard in of_ranks(3)] == [8, 12, 12]
    assert [len(share_of_groups(4, 1, shard)) for shard in of_ranks(3)] == [1, 1, 2]
    single = {(14336, 2): 112, (2880, 2): 90, (2880, 4): 45, (96, 2): 3, (12, 2): 6}
    assert {key: single_units(*key) for key in single} == single


@given(st.integers(1, 70000), st.integers(1, 8))
def test_single_features_are_divided_by_steps_that_divide_them(features: int, size: int) -> None:
    units = single_units(features, size)
    assert features % units == 0
    assert units >= min(size, features)
