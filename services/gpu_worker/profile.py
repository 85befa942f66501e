"""Measures what a step needs on a GPU besides weights and KV."""

import importlib

import torch

from blockyard.services.gpu_worker.kv_pool import KVPool
from blockyard.services.gpu_worker.memory import Need, blocks_of
from blockyard.services.gpu_worker.models.decoder import Model
from blockyard.services.gpu_worker.sampler.draw import Limits, Noise, draw_limited
from blockyard.services.gpu_worker.step import Step

WORKSPACE = 256 << 20  # libraries' own memory, and fragments


def peak_bytes(model: Model, tokens: int, need: Need, dtype: torch.dtype, device: torch.device) -> int:
    """Of the largest prefill at the end of the longest context, then of sampling the most rows; cuda only.

    The context's blocks are a few that repeat: what is read is as large as it can be, what is held is not.
    """
    size, length = need.block_size, need.max_model_len
    blocks = blocks_of(tokens, size)
    pool = KVPool(model.shape, blocks, size, dtype, device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    positions = torch.arange(length - tokens, length, device=device)
    table = torch.arange(blocks_of(length, size), dtype=torch.int32, device=device)[None] % blocks
    slots, starts = torch.zeros_like(positions), torch.tensor([0, tokens], dtype=torch.int32, device=device)
    triton_ops = importlib.import_module("blockyard.services.gpu_worker.triton_ops")  # for a GPU alone
    attend = triton_ops.MixedAttention(pool, slots, positions, table, starts)
    hidden = model.forward(Step(torch.zeros_like(positions), positions, attend))
    del attend
    _sample(model.logits(hidden[-min(need.max_num_seqs, tokens) :]).float())
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    del pool, hidden
    torch.cuda.empty_cache()
    return peak + WORKSPACE


def _sample(logits: torch.Tensor) -> None:
    """With limits that leave every token, the costliest case."""
    rows = len(logits)
    zeros = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    ones = torch.ones(rows, device=logits.device)
    limits = Limits(zeros + logits.shape[1], ones, zeros.float())
    draw_limited(logits, limits, Noise(zeros.expand(2, rows), zeros, zeros))
