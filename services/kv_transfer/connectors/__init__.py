"""Connectors copy KV blocks from one worker's arena into another's.

A connector is a `BlockWriter` on the sender's side and a `BlockReader` on the receiver's: `interface`. `mapped` writes
into the mapped memory of a worker on the same host (`shm`, `cuda_ipc`), `tcp` sends the bytes with the frames.
`selection` picks a connector by trying it. `sender_link` and `receiver` call connectors, which know only single copies
and no transfers; `block_memory.BlockMemory` copies for them, in host or GPU memory. `faults` wraps a connector for
tests.
Imports go from `selection` to `mapped` and `tcp`, and from there and from `faults` to `interface`.
"""
