"""The kinds of decoder layers give the same with the kernels of a GPU as with torch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import BY_NAME, VOCAB, start

from blockyard.services.gpu_worker.layers.fused_ops import TorchOps
from blockyard.services.gpu_worker.layers.triton_ops import TritonOps
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step import Step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits(runner: Runner, ids: list[int]) -> torch.Tensor:
    size, positions = runner.geometry.block_size, np.arange(len(ids))
    table = np.arange(-(-len(ids) // size))
    counts = np.array([len(ids)])
    attend = runner.host.metadata_builder.attention(
        table[positions // size], positions % size, table[None], counts, counts, np.array([0]), num_decodes=0
    )
    device = runner.pool.device
    step = Step(torch.tensor(ids, device=device), torch.from_numpy(positions).to(device), attend)
    with torch.inference_mode():
        return runner.model.logits(runner.model.forward(step))


@pytest.mark.parametrize(
    "name", ["gemma3", "gemma4-sees", "olmo2", "cohere-plus", "falcon-40b-like", "gpt2", "starcoder2"]
)
def test_kernels_of_a_gpu_in_all_kinds_of_layers(name: str, tmp_path: Path) -> None:
    """Kernels for the norms and activations that have some, torch for the others."""
    BY_NAME[name].save(tmp_path)
    runner = start(tmp_path, device=DEVICE)
    model, ids = runner.model, np.random.default_rng(4).integers(2, VOCAB, 7).tolist()
    assert isinstance(model, Decoder)
    model._ops = TorchOps()
    expected = logits(runner, ids)
    model._ops = TritonOps()
    torch.testing.assert_close(logits(runner, ids), expected, rtol=1e-4, atol=1e-4)
