"""Owns the memory of the KV cache, and knows what its blocks hold.

- `pool.KVPool` is all blocks, as views of an arena of `kv_transfer`. `scales` finds the scales of an 8-bit KV cache.
- `block_hashes.BlockHashes`: which blocks are full, and their hashes. A scheduler gets them when it attaches.
- `host_swap.HostSwap`: saves blocks to host memory, fetches them, copies blocks within the pool, and knows the slots
  of failed fetches. A backend (`startup/`) allocates the host memory.
- `pool_blocks.PoolBlocks`: the blocks, for transfers to and from other workers (`gpu_worker.transfers`).

`batch.Batch` calls this folder for each plan, `engine` at the start. It imports `models.interface`, `loading.weights`,
`memory`, and `kv_transfer` for the copies to host memory.
"""
