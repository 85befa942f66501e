"""The parts of a decoder that are prepared once the weights are loaded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import BY_NAME, start

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.step import LogitsIndices, Step


@pytest.mark.parametrize(("name", "norms_per_layer"), [("llama", 2), ("qwen3", 3)])  # qwen3: one for q and k
def test_every_norm_is_prepared(
    name: str, norms_per_layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm that is not prepared computes the same values on the CPU, but takes longer."""
    prepared: list[RMSNorm] = []
    prepare = RMSNorm.prepare

    def recorded_prepare(norm: RMSNorm) -> None:
        prepared.append(norm)
        prepare(norm)

    monkeypatch.setattr(RMSNorm, "prepare", recorded_prepare)
    BY_NAME[name].save(tmp_path)
    num_layers = len(start(tmp_path).model.shape.attention)
    assert len({id(norm) for norm in prepared}) == norms_per_layer * num_layers + 1, "the last one is the final norm"


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "name", ["qwen3", "olmo2", "cohere", "falcon-40b-like", "gemma4-moe", "deepseek-v3", "opt-350m-like"]
)
def test_the_last_layer_drops_rows_that_nobody_needs(name: str, batch_invariant: bool, tmp_path: Path) -> None:
    BY_NAME[name].save(tmp_path)
    runner = start(tmp_path, batch_invariant=batch_invariant)
    size, positions = runner.geometry.block_size, np.arange(9)
    table, counts = np.arange(-(-len(positions) // size)), np.array([len(positions)])
    rows = torch.tensor([8, 2, 2])
    indices = LogitsIndices(rows, torch.zeros(3, dtype=torch.int64), rows)
    found = []
    for needed in (None, indices):
        attend = CpuMetadataBuilder(runner.pool).attention(
            table[positions // size], positions % size, table[None], counts, counts, np.array([0]), num_decodes=0
        )
        where = torch.from_numpy(positions)
        with torch.inference_mode():
            found.append(runner.model.forward(Step(where + 3, where, attend, needed)))
    torch.testing.assert_close(found[1], found[0][rows])
