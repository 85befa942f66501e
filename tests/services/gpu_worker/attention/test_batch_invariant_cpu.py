"""On CPU with --batch-invariant: results have the same bits in any batch and any chunks, and are correct."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.models.interface import ModelShape

LENGTH, SIZE, HEADS = 70, 16, 4
PLAIN = AttentionShape(num_heads=HEADS, kv_heads=2, head_dim=32, rules=ScoreRules(scale=32**-0.5))
LAYERS = (
    PLAIN,
    replace(PLAIN, rules=replace(PLAIN.rules, window=20)),
    replace(PLAIN, kv_heads=1, head_dim=48, latent_dim=40),
    replace(PLAIN, rules=replace(PLAIN.rules, window=20, sinks=torch.tensor([0.5, -3.0, 4.0, 9.0]))),
)
SHAPE = ModelShape(vocab_size=10, max_positions=128, attention=LAYERS)


class Rig:
    """The sequence under test is in blocks 0 to 7, the other sequences are in later blocks."""

    def __init__(self, layer: int, dtype: torch.dtype, batch_invariant: bool = False) -> None:
        torch.manual_seed(3)
        self.pool = KVPool(SHAPE, 40, SIZE, dtype, torch.device("cpu"), batch_invariant)
        self.planner = CpuMetadataBuilder(self.pool)
        planes, heads, dim = LAYERS[layer].kept
        self.qkv = torch.randn(LENGTH, HEADS + planes * heads, dim).to(dtype)
        angles = torch.randn(LENGTH, 1, dim // 2)
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        self.norm = RMSNorm(torch.randn(HEADS + heads, dim).to(dtype), 1e-6)

    def step(self, spans: list[tuple[int, int]], layer: int) -> list[torch.Tensor]:
        """Computes these tokens of sequences 0, 1, ...: all have the same content, each in its own blocks."""
        order = sorted(range(len(spans)), key=lambda i: spans[i][1] - spans[i][0] > 1)
        begins, counts = (np.array([f(*spans[i]) for i in order]) for f in (lambda a, b: a, lambda a, b: b - a))
        positions = np.concatenate([np.arange(*spans[i]) for i in order])
        tables = np.stack([np.arange(8) + 8 * i for i in order])
        rows = np.repeat(np.arange(len(order)), counts)
        attend = self.planner.attention(
            tables[rows, positions // SIZE],
            positions % SIZE,
            tables,
            counts,
            begins + counts,
            np.array(order) + 1,
            int((counts == 1).sum()),
        )
        out = attend(layer, self.qkv[positions].clone(), self.rotation[positions], self.norm)
        parts = dict(zip(order, out.split(counts.tolist()), strict=True))
        return [parts[i] for i in range(len(spans))]


@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_bitwise_equal(dtype: torch.dtype, layer: int) -> None:
    usual, rig = Rig(layer, dtype), Rig(layer, dtype, batch_invariant=True)
    (whole,) = rig.step([(0, LENGTH)], layer)
    (want,) = usual.step([(0, LENGTH)], layer)
    torch.testing.assert_close(whole, want, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
    chunks = [rig.step([span], layer)[0] for span in ((0, 31), (31, 32), (32, 61))]
    first, *_ = rig.step([(61, 62), (0, 1), (0, 17), (0, 1)], layer)
    rest = [rig.step([(at, at + 1), (1, 9), (1, 2)], layer)[0] for at in range(62, LENGTH)]
    assert torch.equal(torch.cat([*chunks, first, *rest]), whole)
