"""Copies of KV blocks between a worker's device and its host memory.

`host_store.BlockStore` is the interface. `PlainStore` copies at once, `stream_store.StreamStore` on CUDA streams beside
the model. `gpu_worker/kv` makes and calls a store. Imports nothing else of `kv_transfer`.
"""
