"""Kernels of a decoder layer outside of attention.

Linear layers: `linear_skinny` for one to eight rows, `linear_stream_k` for more; the worker's tuner measures them
beside cuBLAS and picks. `add_rms_norm`, `rms_norm`, `silu_mul` and `apply_rope` are what their names say. No import
of another folder.
"""
