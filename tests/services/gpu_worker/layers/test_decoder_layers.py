"""The kinds of decoder layers give the same with the kernels of a GPU as with torch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import BY_NAME, VOCAB, start

from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.layers.fused_ops import OPS, TorchOps
from blockyard.services.gpu_worker.layers.triton_ops import TritonOps
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step import Step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits(runner: Runner, ids: list[int]) -> torch.Tensor:
    size, positions = runner.geometry.block_size, np.arange(len(ids))
    table = np.arange(-(-len(ids) // size))
    counts = np.array([len(ids)])
    attend = CpuMetadataBuilder(runner.pool).attention(
        table[positions // size], positions % size, table[None], counts, counts, np.array([0]), num_decodes=0
    )
    device = runner.pool.device
    step = Step(torch.tensor(ids, device=device), torch.from_numpy(positions).to(device), attend)
    with torch.inference_mode():
        return runner.model.logits(runner.model.forward(step))


@pytest.mark.parametrize(
    "name", ["gemma3", "gemma4-sees", "olmo2", "cohere-plus", "falcon-40b-like", "gpt2", "starcoder2"]
)
def test_kernels_of_a_gpu_in_all_kinds_of_layers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for the norms and activations that have some, torch for the others."""
    BY_NAME[name].save(tmp_path)
    ids, found = np.random.default_rng(4).integers(2, VOCAB, 7).tolist(), []
    for ops in (TorchOps, TritonOps):
        monkeypatch.setitem(OPS, DEVICE, ops)
        found.append(logits(start(tmp_path, device=DEVICE), ids))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
