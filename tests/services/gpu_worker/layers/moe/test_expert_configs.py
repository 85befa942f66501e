"""Candidates of tile sizes for experts, and which measured ones serve other numbers of rows."""

import math

import pytest
from msgspec.structs import replace

from blockyard.services.gpu_worker.layers.moe import expert_configs
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, ExpertShape, candidates, pick

QWEN3_30B = ExpertShape(128, 8, 2048, 768)
DEEPSEEK_V2_LITE = ExpertShape(64, 6, 2048, 1408)
MIXTRAL = ExpertShape(8, 2, 4096, 14336)
MEASURED = ExpertConfig("grouped", (64, 64, 4, 4), (64, 64, 4, 4), 16)


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 100, 256, 2048, 65536])
def test_every_number_of_rows_has_candidates(rows: int) -> None:
    some = candidates(QWEN3_30B, rows)
    assert len(set(some)) == len(some) >= 2
    assert pick(QWEN3_30B, rows, {}) == some[0]


def test_more_pairs_an_expert_take_larger_tiles() -> None:
    tiles = [candidates(QWEN3_30B, rows)[0].tile for rows in (1, 64, 512, 2048, 8192)]
    assert tiles == sorted(tiles) and tiles[0] < tiles[-1]
    assert list(expert_configs.GROUPED)[-1] == math.inf


def test_few_rows_take_products_without_tensor_cores_and_many_those_with_descriptors() -> None:
    def rows_of(shape: ExpertShape, kernel: str) -> list[int]:
        return [rows for rows in (0, 1, 2, 3, 64, 512, 1024, 2048) if candidates(shape, rows)[0].kernel == kernel]

    assert rows_of(QWEN3_30B, "skinny") == [1, 2]
    assert rows_of(DEEPSEEK_V2_LITE, "skinny") == [1], "two rows often share an expert"
    assert rows_of(MIXTRAL, "skinny") == [1]
    assert rows_of(QWEN3_30B, "prefill") == [1024, 2048]
    assert rows_of(replace(QWEN3_30B, takes_prefill=False), "prefill") == []
    for rows in (1, 2, 1024, 2048):
        assert candidates(QWEN3_30B, rows)[-1].kernel == "grouped", "it is measured, too"


def test_a_measured_config_serves_numbers_of_rows_that_are_near() -> None:
    measured = {2048: MEASURED}
    assert pick(QWEN3_30B, 2048, measured) == MEASURED
    assert pick(QWEN3_30B, 1400, measured) == pick(QWEN3_30B, 3000, measured) == MEASURED
    for far in (0, 1, 1024, 4096):
        assert pick(QWEN3_30B, far, measured) == candidates(QWEN3_30B, far)[0]
    skinny = candidates(QWEN3_30B, 2)[1]
    assert pick(QWEN3_30B, 3, {2: skinny}) == candidates(QWEN3_30B, 3)[0], "these kernels are for few rows"


def test_weights_of_4_bits_stay_in_registers_where_tiles_have_few_pairs() -> None:
    shape = replace(QWEN3_30B, form="4 bits", takes_mma=True, takes_prefill=False)
    kernels = [candidates(shape, rows)[0].kernel for rows in (1, 2, 3, 64, 256, 512, 2048)]
    assert kernels == ["mma_sums", "mma_sums", "mma", "mma", "mma", "grouped", "grouped"]
    for rows in (1, 2, 3, 64, 256, 512, 2048):
        some = candidates(shape, rows)
        assert len(set(some)) == len(some)
        assert all(one.tile in (8, 16) for one in some if one.kernel.startswith("mma"))
        assert expert_configs.pick_unfused(shape, rows, {}).kernel == "grouped", "adapters change it"
