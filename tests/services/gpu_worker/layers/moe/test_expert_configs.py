"""Candidates of tile sizes for experts, and which measured ones serve other numbers of rows."""

import math

import pytest

from blockyard.services.gpu_worker.layers.moe import expert_configs
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, ExpertShape, candidates, pick

QWEN3_30B = ExpertShape(128, 8, 2048, 768)
MEASURED = ExpertConfig(16, (64, 64, 4, 4), (64, 64, 4, 4))


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 100, 256, 2048, 65536])
def test_every_number_of_rows_has_candidates(rows: int) -> None:
    some = candidates(QWEN3_30B, rows)
    assert len(set(some)) == len(some) >= 2
    assert pick(QWEN3_30B, rows, {}) == some[0]


def test_more_pairs_an_expert_take_larger_tiles() -> None:
    tiles = [candidates(QWEN3_30B, rows)[0].tile for rows in (1, 64, 512, 2048, 8192)]
    assert tiles == sorted(tiles) and tiles[0] < tiles[-1]
    assert list(expert_configs.CANDIDATES)[-1] == math.inf


def test_a_measured_config_serves_numbers_of_rows_that_are_near() -> None:
    measured = {2048: MEASURED}
    assert pick(QWEN3_30B, 2048, measured) == MEASURED
    assert pick(QWEN3_30B, 1400, measured) == pick(QWEN3_30B, 3000, measured) == MEASURED
    for far in (0, 1, 1024, 4096):
        assert pick(QWEN3_30B, far, measured) == candidates(QWEN3_30B, far)[0]
