"""The logits of a runner's model at every position of a prompt."""

import numpy as np
import torch

from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step import InputVectors, Step


def all_logits(
    runner: Runner, ids: list[int], chunks: list[int], vectors: dict[int, torch.Tensor] | None = None
) -> torch.Tensor:
    """Logits at every position, computed in chunks of the given sizes on blocks in random order.

    vectors: inputs [hidden] in place of ids, by position.
    """
    size = runner.geometry.block_size
    table = np.random.default_rng(5).permutation(runner.geometry.num_blocks)[: -(-len(ids) // size)]
    device = runner.pool.device
    parts, done = [], 0
    with torch.inference_mode():
        for count in chunks:
            positions = np.arange(done, done + count)
            done += count
            attend = CpuMetadataBuilder(runner.pool).attention(
                table[positions // size],
                positions % size,
                table[None],
                np.array([count]),
                np.array([done]),
                np.array([0]),
                num_decodes=int(count == 1),
            )
            tokens = torch.tensor(ids, device=device)[positions]
            given = [(row, at) for row, at in enumerate(positions.tolist()) if at in (vectors or {})]
            inputs = None
            if vectors and given:
                rows = torch.tensor([row for row, _ in given], device=device)
                inputs = InputVectors(rows, torch.stack([vectors[at] for _, at in given]).to(device))
            step = Step(tokens, torch.from_numpy(positions).to(device), attend, vectors=inputs)
            hidden = runner.model.forward(step)
            parts.append(runner.model.logits(hidden))
    assert done == len(ids)
    return torch.cat(parts)
