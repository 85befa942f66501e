"""The parts of a decoder that are prepared once the weights are loaded."""

from pathlib import Path

import pytest
from tiny_models import BY_NAME, start

from blockyard.kernels.layers.rms_norm import RMSNorm


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
