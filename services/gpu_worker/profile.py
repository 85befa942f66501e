"""Measures what a forward pass needs on a GPU besides weights and KV."""

import numpy as np
import torch

from blockyard.services.gpu_worker.kv_pool import KVPool
from blockyard.services.gpu_worker.models.decoder import Model
from blockyard.services.gpu_worker.reads import ReadPlanner
from blockyard.services.gpu_worker.step import Step


def peak_bytes(model: Model, tokens: int, block_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Runs one prefill of `tokens` with its logits on a pool just large enough; cuda only."""
    blocks = -(-tokens // block_size)
    pool = KVPool(model.shape, blocks, block_size, dtype, device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    positions = np.arange(tokens)
    attend = ReadPlanner(pool).attention(
        positions // block_size,
        positions % block_size,
        np.arange(blocks)[None],
        np.array([tokens]),
        np.array([tokens]),
        np.array([0]),
        num_decodes=int(tokens == 1),
    )
    index = torch.from_numpy(positions).to(device)
    hidden = model.forward(Step(torch.zeros_like(index), index, attend))
    model.logits(hidden[-256:]).float().log_softmax(-1)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    del pool, hidden, attend
    torch.cuda.empty_cache()
    return peak + (256 << 20)  # fragments; the libraries' own workspaces stay allocated and count by themselves
