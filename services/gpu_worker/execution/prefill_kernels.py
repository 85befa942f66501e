"""Compiles the kernels of prefill attention before the worker is ready, so that no stream waits for one later.

Triton's cache on disk has them at a second start. Imports Triton.
"""

import logging
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from triton.errors import TritonError

from blockyard.kernels.attention.latent.latent_prefill import KeyPiece, PrefillState, latent_prefill
from blockyard.kernels.attention.latent.prefill_in_pieces import gather_rows
from blockyard.kernels.attention.paged_prefill import kernel_lengths, paged_prefill
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.cores import compile_threads
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.attention import AttentionShape

log = logging.getLogger(__name__)

ROWS = 16  # also the width of block tables here; workers have multiples of it


def compile_prefills(pool: KVPool, dtype: torch.dtype) -> None:
    """Compiles for activations of `dtype`, in parallel; new kernels take some ten seconds.

    Failures are logged: a step that needs the kernel reports them.
    """
    shapes = dict.fromkeys(pool.shape.attention)
    kernels = [(shape, max_seq_len) for shape in shapes for max_seq_len in kernel_lengths(shape.head_dim)]
    with ThreadPoolExecutor(compile_threads(len(kernels))) as threads:
        runs = [threads.submit(_run, pool, dtype, *kernel) for kernel in kernels]
    for run in runs:
        try:
            run.result()
        except (RuntimeError, TritonError) as e:
            log.warning("prefill attention could not be compiled ahead: %s", e)


@torch.inference_mode()
def _run(pool: KVPool, dtype: torch.dtype, shape: AttentionShape, max_seq_len: int) -> None:
    device, (planes, kv_heads, head_dim) = pool.device, shape.kept
    layer = torch.zeros((ROWS, planes, kv_heads, pool.block_size, head_dim), device=device).to(pool.dtype)
    rows = torch.arange(ROWS, device=device)
    tables = torch.arange(ROWS, dtype=torch.int32, device=device)[None]
    seqs = PagedKVMetadata(torch.zeros_like(rows), rows, tables)
    starts = torch.tensor([0, ROWS], dtype=torch.int32, device=device)
    scales = None if pool.scales is None else torch.ones(2, device=device)
    if shape.latent_dim is not None:
        _run_latent(dtype, shape, layer, seqs, starts, scales)
        return
    heads = shape.num_heads + 2 * shape.kv_heads
    q = torch.zeros((ROWS, heads, shape.head_dim), dtype=dtype, device=device)[:, : shape.num_heads]
    out = q.new_empty((ROWS, shape.num_heads * shape.head_dim))
    options = (shape.soft_cap, scales, shape.chunked, shape.sinks)
    paged_prefill(q, layer, seqs, starts, shape.scale, shape.window, max_seq_len, out, *options)


def _run_latent(
    dtype: torch.dtype,
    shape: AttentionShape,
    layer: Tensor,
    seqs: PagedKVMetadata,
    starts: Tensor,
    scales: Tensor | None,
) -> None:
    """Runs a first piece, one that resumes, and the new tokens with and without pieces before them."""
    assert shape.latent_dim is not None and shape.plain_dim is not None and shape.value_dim is not None
    heads, plain, value, rotated = shape.num_heads, shape.plain_dim, shape.value_dim, shape.head_dim - shape.latent_dim
    query = torch.zeros((ROWS, heads, plain + rotated), dtype=dtype, device=layer.device)
    kv, out = query.new_zeros((ROWS, heads, plain + value)), query.new_empty((ROWS, heads * value))
    piece, state = KeyPiece(0, ROWS), PrefillState.make(ROWS, heads, value, layer.device)
    shared = gather_rows(layer, seqs, starts, piece, dtype, scales)[:, shape.latent_dim :]
    for keys, resume in ((piece, False), (piece, True), (None, True), (None, False)):
        sums = state if keys is not None or resume else None
        latent_prefill(query, kv, shared, seqs, starts, shape.scale, out, keys, sums, resume)
