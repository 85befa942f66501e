"""Measures the GPU memory of a step, besides weights and KV. Imports Triton."""

import torch

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.attention.choice import check_head_sizes
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_attention import build_attention
from blockyard.services.gpu_worker.execution.prompt_logprobs import ROWS_AT_ONCE
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.adapter_rows import NO_PLACE
from blockyard.services.gpu_worker.memory import KVMemoryNeed, blocks_of
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.sampling.logits_edits import MOST_HOST_ROWS
from blockyard.services.gpu_worker.sampling.topk_topp_sampler import Noise, SamplingLimits, sample_limited
from blockyard.services.gpu_worker.step import Step

WORKSPACE = 256 << 20  # allowance for library memory and fragmentation
FEW = 2  # tokens of a small prefill


def peak_bytes(
    model: Model,
    tokens: int,
    need: KVMemoryNeed,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_adapters: bool = False,
) -> int:
    """Returns the peak memory of the largest prefill, of the logits of all sequences, of sampling rows on the host, and
    of the rows of a prompt whose log-probabilities are computed at once. Runs only on a GPU.

    Cached context counts as the longest: attention reads the pool in place, but latent layers decompress it in pieces.
    Also compiles the kernels of steps with prefills. has_adapters: rows may have adapters, whose steps fuse less.
    """
    length = min(tokens, need.max_model_len)
    num_blocks = -(-tokens // length) * blocks_of(length, need.block_size)
    pool = KVPool(model.shape, num_blocks, need.block_size, dtype, device, need.batch_invariant)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    places = torch.full((tokens,), NO_PLACE, dtype=torch.int32, device=device) if has_adapters else None
    with model.adapter_rows.meanwhile(places):
        hidden = _prefill(model, pool, tokens, need.max_model_len, length)
    model.logits(hidden[-min(need.max_num_seqs, tokens) :])
    _sample(model.logits(hidden[-min(need.max_num_seqs, tokens, MOST_HOST_ROWS) :]).float())
    model.logits(hidden[-ROWS_AT_ONCE:])
    for max_seq_len in (need.max_model_len, FEW):  # compiles attention with split-KV and without
        _prefill(model, pool, min(length, FEW), max_seq_len, length)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    del pool, hidden
    torch.cuda.empty_cache()
    return peak + WORKSPACE


def _prefill(model: Model, pool: KVPool, tokens: int, max_seq_len: int, length: int) -> torch.Tensor:
    """Runs one prefill of sequences of `length` tokens. Raises LoadError for a head size that the kernels do not
    support."""
    check_head_sizes("cuda", model.shape.attention)
    rows, device = torch.arange(tokens, device=pool.device), pool.device
    slots, positions = rows // length, rows % length
    num_seqs = -(-tokens // length)
    tables = torch.arange(pool.num_blocks, dtype=torch.int32, device=device)
    tables = tables[: num_seqs * blocks_of(length, pool.block_size)].view(num_seqs, -1)
    starts = torch.tensor([*range(0, tokens, length), tokens], dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        PagedKVMetadata(slots, positions, tables), starts, max_seq_len=max_seq_len, max_context_len=max_seq_len
    )
    attend = build_attention(pool, metadata)
    return model.forward(Step(slots, positions, attend))


def _sample(logits: torch.Tensor) -> None:
    """Samples all rows with limits that keep every token, which needs the most memory."""
    rows = len(logits)
    zeros = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    ones = torch.ones(rows, device=logits.device)
    limits = SamplingLimits(zeros + logits.shape[1], ones, zeros.float())
    sample_limited(logits, limits, Noise(zeros.expand(2, rows), zeros, zeros))
