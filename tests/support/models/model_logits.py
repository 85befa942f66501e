"""The logits of a runner's model at every position of a prompt."""

import numpy as np
import torch

from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step import Step


def all_logits(runner: Runner, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits at every position, computed in chunks of the given sizes on blocks in random order."""
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
            hidden = runner.model.forward(Step(tokens, torch.from_numpy(positions).to(device), attend))
            parts.append(runner.model.logits(hidden))
    assert done == len(ids)
    return torch.cat(parts)
