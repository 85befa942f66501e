"""Connectors copy KV blocks from one worker's arena into another's.

A connector is a `BlockWriter` on the sender's side and a `BlockReader` on the receiver's: `interface`. `mapped` writes
into the mapped memory of a worker on the same host (`shm`, `cuda_ipc`), `tcp` sends the bytes with the frames, `nixl`
writes them to staging memory of the receiver (`nixl_access`) with the package of that name, by RDMA where it can.
`selection` picks a connector by trying it. `sender_link`
and `receiver` call connectors, which know only single copies and no transfers; `block_copier.BlockCopier` copies for
`mapped` and `tcp`, in host or GPU memory, and computes checksums for all. `faults` wraps a connector for tests.

What proves that a sender does not write any more, so that the receiver may end its transfers when the link has broken:

- `tcp`: the link's end, because the receiver itself writes the bytes.
- `shm`, `cuda_ipc`: the end of the sender's process.
- `nixl`: the end of the receiver's agent for this sender, and on one host also the end of the sender's process.

A new hello of the same sender proves it, too. Imports go from `selection` to `mapped`, `tcp` and `nixl`, from there to
`interface`, and from `nixl` and `nixl_access` to `nixl_agent`. `faults` imports `interface` and `nixl_access`.
"""
