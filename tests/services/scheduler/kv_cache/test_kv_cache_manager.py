"""What the KV cache of a group says of a prefix before it is looked up."""

import pytest

from blockyard.services.scheduler.kv_cache.kv_cache_manager import CacheStats, KVCacheManager
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.shared.messages import Geometry

A, B = b"a" * 16, b"b" * 16


@pytest.mark.parametrize("window", [None, 8])
def test_a_prefix_may_be_cached_if_its_first_block_is_or_lies_outside_the_window(window: int | None) -> None:
    geometry = Geometry(8, 4, 64, 100, [1], 4, 32, window=window)
    cache = KVCacheManager(geometry, 32, PlanClock(), BlockHasher("", enabled=True), CacheStats())
    cache.blocks.index.insert(3, A)
    assert cache.may_have_cached(A)
    assert cache.may_have_cached(B) == (window is not None)
