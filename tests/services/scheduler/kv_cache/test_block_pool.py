"""Blocks that transfers hold or reserve."""

import random

import pytest

from blockyard.services.scheduler.kv_cache import block_pool
from blockyard.services.scheduler.kv_cache.block_pool import BlockPool
from blockyard.services.scheduler.plan_pacer import PlanClock

from ..harness.invariants import blocks_in_order


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(6, 4, PlanClock(), num_host_blocks=2)


def name(i: int) -> bytes:
    return bytes([i]) * 16


def cache(pool: BlockPool, count: int) -> list[int]:
    """Cached blocks without a holder."""
    blocks = pool.take(count)
    pool.release(blocks, [name(i) for i in range(count)])
    return blocks


def test_a_block_that_a_transfer_holds_is_not_given_out_when_its_sequence_ends(pool: BlockPool) -> None:
    blocks = pool.take(2)
    pool.share(blocks)
    pool.release(blocks, [name(0), name(1)])
    assert (pool.num_used, pool.num_free) == (2, 4)
    assert set(pool.take(4)).isdisjoint(blocks)
    pool.release(blocks, ())
    assert pool.num_free == 2


def test_reserved_blocks_are_cached_once_they_have_landed(pool: BlockPool) -> None:
    blocks = pool.reserve(2)
    assert blocks is not None
    assert pool.index.find([name(0), name(1)], 2) == []
    pool.land(blocks, [name(0), name(1)])
    pool.release(blocks, ())
    assert pool.index.find([name(0), name(1)], 2) == blocks
    assert pool.num_free == 6


def test_a_landed_block_that_is_cached_already_becomes_free(pool: BlockPool) -> None:
    (cached,) = cache(pool, 1)
    blocks = pool.reserve(1)
    assert blocks is not None
    pool.land(blocks, [name(0)])
    pool.release(blocks, ())
    assert pool.index.get(name(0)) == cached
    assert pool.uncached.num_free == 5


def test_reserving_evicts_without_a_copy_to_host_memory(pool: BlockPool) -> None:
    cache(pool, 6)
    assert pool.reserve(7) is None
    assert len(pool.reserve(2) or []) == 2
    assert not pool.host.saves


def test_nothing_is_reserved_while_copies_to_host_memory_wait_for_their_plan(pool: BlockPool) -> None:
    """The copy would read what another worker has written."""
    cache(pool, 6)
    taken = pool.take(1)
    pool.release(taken, ())
    assert pool.reserve(1) is None
    pool.host.take()
    assert pool.reserve(1) == taken


def test_open_transfers_of_a_new_worker_hold_blocks_with_and_without_contents(pool: BlockPool) -> None:
    pool.restore([1], [name(1)])
    pool.hold_open([1, 2])
    pool.hold_open([1, 3])
    assert pool.num_used == 3
    assert set(pool.take(3)).isdisjoint({1, 2, 3})
    pool.release([1, 2], ())
    assert pool.num_free == 1
    pool.release([1, 3], ())
    assert pool.num_free == 3


def random_pool(seed: int) -> tuple[object, ...]:
    """What is free, cached and held, in order, after prompts with shared beginnings have come and gone."""
    rng, plan_clock = random.Random(seed), PlanClock()
    pool = BlockPool(400, 4, plan_clock)
    held: list[tuple[list[int], list[bytes]]] = []
    for step in range(300):
        if held and rng.random() < 0.5:
            blocks, hashes = held.pop(rng.randrange(len(held)))
            pool.release(blocks, hashes)
        elif (count := rng.randrange(1, 90)) <= pool.num_free // 2:
            chain = rng.randrange(6)
            hashes = [bytes([chain, 0 if i < 40 else step % 100, i]) * 6 for i in range(count)]
            found = pool.index.find(hashes, count)
            pool.share(found)
            blocks = found + pool.take(count - len(found))
            if rng.random() < 0.6:
                pool.index.insert_each(blocks[len(found) :], hashes[len(found) :])
            held.append((blocks, hashes[: rng.randrange(len(found), count + 1)]))
            if rng.random() < 0.3:  # a transfer reads them too
                pool.share(blocks)
                held.append((blocks, []))
        if rng.random() < 0.5:
            plan_clock.on_sent(plan_clock.last_sent + 1)
        elif plan_clock.last_completed < plan_clock.last_sent:
            plan_clock.on_completed(plan_clock.last_completed + 1)
            pool.free_pending()
    states = [state_of(pool)]
    for blocks, hashes in held:  # of another state, if holders were miscounted
        pool.release(blocks, hashes)
        states.append(state_of(pool))
    return tuple(states)


def state_of(pool: BlockPool) -> tuple[object, ...]:
    index = pool.index
    hashes = [index.hash_of(block) for block in range(pool.num_ids)]
    return pool.uncached.free_ids(), blocks_in_order(index.free_queue), hashes, {**index.new}, pool.num_used


@pytest.mark.parametrize("seed", range(8))
def test_many_blocks_are_released_as_few_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_bulk = random_pool(seed)
    monkeypatch.setattr(block_pool, "MANY_BLOCKS", 1000)
    assert in_bulk == random_pool(seed)
