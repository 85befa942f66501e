"""KV cache accounting: which block of a worker group holds what, and which are free. The KV data is on the worker.

Start with `KVCacheManager`: each worker group has one. It owns the `BlockPool` (reference counts and free
blocks), the `PrefixIndex` (cached blocks by hash, evicted in LRU order), the `HostTier` (blocks in host memory) and the
`SlidingWindow`, and writes the `BlockTable` of each running sequence. The search for a cached prefix is `find` of the
manager, over prefix_cache.py.

Planners allocate and extend, results mark blocks as full, worker groups free. A block that is given up stays pending
until the last plan sent by then has its result. Imports `sequences` and `plan_pacer`.
"""
