"""The logits of a runner's model at every position of a prompt."""

import numpy as np
import torch

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_attention import build_attention
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step import Attend, InputVectors, Step


def all_logits(
    runner: Runner, ids: list[int], chunks: list[int], vectors: dict[int, torch.Tensor] | None = None
) -> torch.Tensor:
    """Logits at every position, computed in chunks of the given sizes on blocks in random order.

    vectors: inputs [hidden] in place of ids, by position.
    """
    hidden = hidden_in_chunks(runner.model, runner.pool, ids, chunks, vectors)
    ends = np.cumsum(chunks)
    with torch.inference_mode():
        return torch.cat([runner.model.logits(hidden[end - n : end]) for n, end in zip(chunks, ends, strict=True)])


def hidden_in_chunks(
    model: Model, pool: KVPool, ids: list[int], chunks: list[int], vectors: dict[int, torch.Tensor] | None = None
) -> torch.Tensor:
    """The hidden states behind `all_logits`."""
    blocks = -(-len(ids) // pool.block_size)
    table = np.random.default_rng(5).permutation(pool.num_blocks)[:blocks]
    device = pool.device
    parts, done = [], 0
    with torch.inference_mode():
        for count in chunks:
            positions = np.arange(done, done + count)
            done += count
            attend = _attend(pool, table, positions)
            tokens = torch.tensor(ids, device=device)[positions]
            given = [(row, at) for row, at in enumerate(positions.tolist()) if at in (vectors or {})]
            inputs = None
            if vectors and given:
                rows = torch.tensor([row for row, _ in given], device=device)
                inputs = InputVectors(rows, torch.stack([vectors[at] for _, at in given]).to(device))
            step = Step(tokens, torch.from_numpy(positions).to(device), attend, vectors=inputs)
            parts.append(model.forward(step).clone())
    assert done == len(ids)
    return torch.cat(parts)


def _attend(pool: KVPool, table: np.ndarray, positions: np.ndarray) -> Attend:
    """The attention of one chunk of a prompt: on a GPU by its kernels. table: the blocks of the prompt."""
    if pool.device.type == "cpu":
        return CpuMetadataBuilder(pool).attention(
            table[positions // pool.block_size],
            positions % pool.block_size,
            table[None],
            np.array([len(positions)]),
            np.array([positions[-1] + 1]),
            np.array([0]),
            num_decodes=int(len(positions) == 1),
        )
    rows = PagedKVMetadata(
        torch.zeros(len(positions), dtype=torch.int64, device=pool.device),
        torch.from_numpy(positions).to(pool.device),
        torch.from_numpy(table[None].astype(np.int32)).to(pool.device),
    )
    starts = torch.tensor([0, len(positions)], dtype=torch.int32, device=pool.device)
    return build_attention(
        pool,
        AttentionMetadata(
            rows,
            query_start_loc=None if len(positions) == 1 else starts,
            num_decodes=int(len(positions) == 1),
            max_seq_len=int(positions[-1]) + 1,
            max_context_len=int(positions[0]),
        ),
    )
