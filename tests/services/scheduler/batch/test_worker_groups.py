"""How far plans run ahead of a worker."""

import pytest

from blockyard.services.scheduler.batch.worker_groups import BatchLimits, WorkerGroup
from blockyard.services.scheduler.kv_cache.kv_cache_manager import CacheStats
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher
from blockyard.shared.messages import Geometry


@pytest.mark.parametrize(
    ("asked", "step_s", "depth"),
    [
        (None, 0.0, 1),
        (None, 0.0041, 1),
        (None, 0.002, 1),
        (None, 0.0006, 4),
        (None, 0.00001, 7),
        (0, 0.0006, 0),
        (12, 0.0041, 12),
    ],
)
def test_without_a_setting_plans_ahead_cover_two_milliseconds(asked: int | None, step_s: float, depth: int) -> None:
    geometry = Geometry(8, 16, 64, 100, [1], 4, 32, step_s=step_s)
    limits = BatchLimits(16, 32, asked)
    assert WorkerGroup(1, geometry, limits, BlockHasher("", enabled=True), CacheStats()).depth == depth
    assert limits.num_slots == (18 if depth else 16)


@pytest.mark.parametrize(("limit", "takes"), [(8, 8), (64, 32)])
def test_a_step_holds_what_both_scheduler_and_worker_allow(limit: int, takes: int) -> None:
    group = WorkerGroup(
        1,
        Geometry(8, 16, 64, 100, [1], 32, 32),
        BatchLimits(limit, limit, 1),
        BlockHasher("", enabled=True),
        CacheStats(),
    )
    assert (group.max_num_seqs, group.max_num_batched_tokens) == (takes, takes)
    assert group.slots.num_free == takes + takes // 8, "a worker with fewer sequences has fewer slots"
