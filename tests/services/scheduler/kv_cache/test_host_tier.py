"""The host tier alone and through the core: which blocks it keeps, for how long, and which are fetched."""

import pytest

from blockyard.services.scheduler.kv_cache.host_tier import HostTier
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.shared.messages import BlockFetch, BlockSave, StepPlan

from ..conftest import Ring

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def sent(plan_clock: PlanClock, done: bool = True) -> None:
    plan_clock.last_sent += 1
    if done:
        plan_clock.last_completed = plan_clock.last_sent


def plans(it: Ring) -> list[StepPlan]:
    return [o.frame for o in it.world.sent if isinstance(o.frame, StepPlan)]


def test_the_least_recently_used_block_is_evicted() -> None:
    plan_clock = PlanClock()
    tier = HostTier(2, plan_clock)
    tier.save(7, A)
    tier.save(8, B)
    assert tier.take() == ([BlockSave(7, 0, A), BlockSave(8, 1, B)], [])
    sent(plan_clock)
    tier.save(9, A)  # it is in host memory already: no copy, but it counts as used
    tier.save(3, C)
    assert tier.take() == ([BlockSave(3, 1, C)], [])
    assert (tier.get(A), tier.get(B), tier.get(C), tier.num_used) == (0, None, 1, 2)


def test_blocks_that_a_plan_in_flight_copies_stay() -> None:
    plan_clock = PlanClock()
    tier = HostTier(1, plan_clock)
    tier.save(7, A)
    tier.save(8, B)  # there is no room: A's block is being written
    tier.take()
    sent(plan_clock)
    tier.fetch(tier.pin([A]), [5])
    tier.save(8, B)
    assert tier.take() == ([], [BlockFetch(0, 5)])
    sent(plan_clock, done=False)
    tier.save(8, B)
    assert (tier.get(A), tier.get(B)) == (0, None)
    plan_clock.last_completed = plan_clock.last_sent
    tier.save(8, B)
    assert (tier.get(A), tier.get(B)) == (None, 0)


def test_removed_blocks_are_pending_until_the_results() -> None:
    plan_clock = PlanClock()
    tier = HostTier(1, plan_clock)
    tier.save(7, A)
    tier.take()
    sent(plan_clock, done=False)
    tier.remove([A])
    tier.save(8, B)
    assert tier.num_used == 0
    plan_clock.last_completed = plan_clock.last_sent
    tier.free_pending()
    tier.save(8, B)
    assert tier.take() == ([BlockSave(8, 0, B)], [])


def test_the_oldest_host_block_of_an_attached_worker_is_evicted_first() -> None:
    tier = HostTier(3, PlanClock())
    tier.restore([2, 0, 1], [A, B, C])
    tier.save(9, b"d" * 16)
    assert (tier.get(A), tier.get(B)) == (None, 0)


def test_without_memory_nothing_is_saved() -> None:
    tier = HostTier(0, PlanClock())
    tier.save_all([1], [A])
    tier.save(1, A)
    assert tier.take() == ([], [])


def crowd(ring: type[Ring], **shape: object) -> Ring:
    """Four sequences of 52 tokens in a pool of 36 blocks of 4."""
    it = ring(num_blocks=36, max_num_batched_tokens=32, **shape)
    for i in range(4):
        it.submit(str(i), 0, prompt=[50 * i + p for p in range(12)], max_tokens=40)
    it.finish()
    assert it.world.core.stats().preemptions_total > 0
    return it


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_sequences_come_back(ring: type[Ring], depth: int, prefix_caching: bool) -> None:
    it = crowd(ring, depth=depth, prefix_caching=prefix_caching, num_host_blocks=60)
    stats = it.world.core.stats()
    assert min(stats.blocks_saved_total, stats.blocks_fetched_total) > 0
    assert (stats.host_blocks_total, stats.host_blocks_used > 0) == (60, prefix_caching)
    computed = crowd(ring, depth=depth, prefix_caching=False).world.core.stats().prompt_tokens_total
    assert stats.prompt_tokens_total < computed
    if not prefix_caching:
        assert (stats.prefix_queries_total, stats.prefix_hits_total) == (0, 0), "what it finds is its own"


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_blocks_that_cannot_be_fetched_are_computed(ring: type[Ring], depth: int) -> None:
    it = crowd(ring, depth=depth, num_host_blocks=60, failing=True)
    fetched = [fetch.block for plan in plans(it) for fetch in plan.fetches]
    assert len(fetched) >= 4, "every fourth fails"


def test_a_plan_saves_a_block_and_reuses_it(ring: type[Ring]) -> None:
    it = crowd(ring, depth=0, num_host_blocks=60)
    first = next(plan for plan in plans(it) if plan.saves)
    given = [b for change in [*first.starts, *first.blocks] for b in change.blocks]
    assert {save.block for save in first.saves} <= set(given)
