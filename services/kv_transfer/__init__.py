"""Copies of KV blocks between a worker's device and its host memory. Only the worker imports this package.

`BlockStore` is the interface. `PlainStore` copies at once, `StreamStore` on CUDA streams beside the model.
"""
