"""KV blocks in GPU memory, for transfers between workers.

- `ipc_memory`: memory of one process in another, through CUDA IPC.
- `stream_copies.StreamCopies`: launches copies on a CUDA stream beside the steps, and reports complete ones.

Imports nothing else of `kv_transfer`, and no Triton. `device_copier` has the copies.
"""
