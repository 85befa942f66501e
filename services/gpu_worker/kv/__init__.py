"""KV memory and its contents.

- `pool.KVPool` owns the memory of all blocks; `scales` finds the scales of a KV cache in 8 bits.
- `block_hashes.BlockHashes` knows which blocks are full and under which hash, for a scheduler that attaches.
- `transfers.Transfers` saves blocks to host memory and fetches them, and knows the slots of failed fetches;
  `host_blocks` sizes and makes that host memory. it copies blocks within the pool, too.

`batch.Batch` calls this folder for each plan. It imports `kv_transfer` for the copies to host memory.
"""
