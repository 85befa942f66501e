"""Compiles the kernels of prefill attention before the worker is ready, so that no stream waits for one later.

Triton's cache on disk has them at a second start. Imports Triton.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor
from triton.errors import TritonError

from blockyard.kernels.attention.latent.latent_prefill import KeyPiece, PrefillState, latent_prefill
from blockyard.kernels.attention.latent.prefill_in_pieces import gather_rows
from blockyard.kernels.attention.prefill_splits import SPLIT_MIN_LEN
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.gpu_facts import runs_hopper_kernels
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.attention.choice import AttentionKernel, RowKind, choose, gpu_decodes
from blockyard.services.gpu_worker.attention.triton_attention import KERNELS, KernelRows
from blockyard.services.gpu_worker.cores import compile_threads
from blockyard.services.gpu_worker.kv.pool import KVPool, LayerKV
from blockyard.services.gpu_worker.layers.attention import AttentionShape

log = logging.getLogger(__name__)

COMPILED = (AttentionKernel.PAGED_PREFILL_HOPPER, AttentionKernel.PAGED_PREFILL, AttentionKernel.LATENT_PREFILL)
ROWS = 16  # also the width of block tables here; workers have multiples of it


def compile_prefills(pool: KVPool, dtype: torch.dtype) -> None:
    """Compiles for activations of `dtype`, in parallel; new kernels take some ten seconds.

    Failures are logged: a step that needs the kernel reports them.
    """
    kernels: dict[tuple[AttentionShape, AttentionKernel, bool], int] = {}
    for shape in dict.fromkeys(pool.shape.attention):
        for length in (1, SPLIT_MIN_LEN - 1, 1 << 20):  # for all kernels of a shape, with and without split keys
            decodes = gpu_decodes(pool, shape, length, runs_hopper_kernels(pool.device))
            kernel = choose(replace(decodes, kind=RowKind.PREFILL))
            if kernel in COMPILED:
                kernels[shape, kernel, length >= SPLIT_MIN_LEN] = length
    with ThreadPoolExecutor(compile_threads(len(kernels))) as threads:
        runs = [threads.submit(_run, pool, dtype, *key[:2], length) for key, length in kernels.items()]
    for run in runs:
        try:
            run.result()
        except (RuntimeError, TritonError) as e:
            log.warning("prefill attention could not be compiled ahead: %s", e)


@torch.inference_mode()
def _run(pool: KVPool, dtype: torch.dtype, shape: AttentionShape, kernel: AttentionKernel, max_seq_len: int) -> None:
    device, (planes, kv_heads, head_dim) = pool.device, shape.kept
    layer = torch.zeros((ROWS, planes, kv_heads, pool.block_size, head_dim), device=device).to(pool.dtype)
    rows = torch.arange(ROWS, device=device)
    tables = torch.arange(ROWS, dtype=torch.int32, device=device)[None]
    seqs = PagedKVMetadata(torch.zeros_like(rows), rows, tables)
    starts = torch.tensor([0, ROWS], dtype=torch.int32, device=device)
    rules = replace(shape.rules, kv_scales=None if pool.scales is None else torch.ones(2, device=device))
    if kernel is AttentionKernel.LATENT_PREFILL:
        _run_latent(dtype, shape, layer, seqs, starts, rules)
        return
    heads = shape.num_heads + 2 * shape.kv_heads
    q = torch.zeros((ROWS, heads, shape.head_dim), dtype=dtype, device=device)[:, : shape.num_heads]
    out = q.new_empty((ROWS, shape.num_heads * shape.head_dim))
    KERNELS[kernel].attend(q, LayerKV(layer, rules), KernelRows(seqs, starts, max_seq_len), out, None)


def _run_latent(
    dtype: torch.dtype,
    shape: AttentionShape,
    layer: Tensor,
    seqs: PagedKVMetadata,
    starts: Tensor,
    rules: ScoreRules,
) -> None:
    """Runs a first piece, one that resumes, and the new tokens with and without pieces before them."""
    assert shape.latent_dim is not None and shape.plain_dim is not None and shape.value_dim is not None
    heads, plain, value, rotated = shape.num_heads, shape.plain_dim, shape.value_dim, shape.head_dim - shape.latent_dim
    query = torch.zeros((ROWS, heads, plain + rotated), dtype=dtype, device=layer.device)
    kv, out = query.new_zeros((ROWS, heads, plain + value)), query.new_empty((ROWS, heads * value))
    piece, state = KeyPiece(0, ROWS), PrefillState.make(ROWS, heads, value, layer.device)
    shared = gather_rows(layer, seqs, starts, piece, dtype, rules.kv_scales)[:, shape.latent_dim :]
    for keys, resume in ((piece, False), (piece, True), (None, True), (None, False)):
        sums = state if keys is not None or resume else None
        latent_prefill(query, kv, shared, seqs, starts, rules, out, keys, sums, resume)
