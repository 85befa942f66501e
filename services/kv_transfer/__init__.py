"""Owns the memory of KV blocks, and moves blocks between workers and between a worker and its host memory.

`gpu_worker.kv` uses `arena` (the memory of `KVPool`) and `host/` (KV offload to host memory), `gpu_worker.transfers`
the `endpoint`.

- `arena.Arena`: all KV blocks of a worker. Other processes of the same host can map it. It knows whether its memory is
  on a GPU, and how staging buffers beside it are allocated.
- `host/`: copies between KV blocks and host memory, for `--swap-space`.
- `layout.BlockLayout`: the shape, dtype and model of KV blocks, and the part that a rank has. Two workers exchange
  blocks only if theirs are equal but for the part.
- `routes`: which rank of a sender writes which heads to which rank of a receiver. Each such pair has a link of its own.
- `protocol/`: the frames between two workers, and the state of transfers on each side. It imports no torch and no zmq.
- `staging.StagingMemory`: buffers for packed blocks, which `nixl` sends, by the `StagingRules` of the arena.
- `connectors/`: copies of block contents into another worker's arena, by mapped memory, TCP or nixl.
- `endpoint.TransferEndpoint`: all that a rank sends and receives for one generation of its memory. `transfer_blocks`:
  what it needs of the rank.
- `sender_links.SenderLinks`: a link for each rank that this one sends to, each a `sender_link.SenderLink`, which
  writes blocks to it. `link_counts`: sums of their counters.
- `receiver.TransferReceiver`: accepts blocks from all other workers. `sender_processes` finds those that have ended.
- `block_copier.BlockCopier`: the blocks for connectors, in host memory (`HostCopier`) or on a GPU
  (`device_copier.DeviceCopier`).
- `copy_thread.CopyThread`: runs copies on a second thread, so that steps go on meanwhile. `host_copies` has the copies
  and their checksums, in numpy. `device/` has copies on a stream of a GPU. `link_sockets` makes the sockets of links.

`gpu_worker` alone imports this package. One thread calls links, protocol and connectors. None of these calls waits,
except `close`. Imports go down: links, `connectors`, `device_copier`, `block_copier`, `copy_thread` and `host_copies`,
`staging`, `arena`, `device`, `protocol`, `routes`, `layout`.
"""
