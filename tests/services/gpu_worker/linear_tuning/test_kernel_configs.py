"""Candidate configs, the choice among them, and the cache file."""

import logging
from pathlib import Path

import pytest

from blockyard.services.gpu_worker.layers.moe import expert_configs
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertShape
from blockyard.services.gpu_worker.linear_tuning import kernel_configs
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import CUBLAS, KernelConfig, LinearShape, TunedConfig

SKINNY, STREAM_K = KernelConfig("skinny", 4), KernelConfig("stream_k", 64, 16)
LAYERS = [LinearShape(4096, 6144, 32), LinearShape(4096, 128256, 1)]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({CUBLAS: 4.0, SKINNY: 3.0, STREAM_K: 3.5}, SKINNY),
        ({CUBLAS: 4.0, SKINNY: 3.9, STREAM_K: 3.8}, STREAM_K),
        ({CUBLAS: 4.0, SKINNY: 3.99}, CUBLAS),  # noise
        ({CUBLAS: 4.0, SKINNY: 5.0}, CUBLAS),
        ({CUBLAS: 4.0}, CUBLAS),
    ],
)
def test_the_quickest_is_picked_cublas_when_in_doubt(times: dict[KernelConfig, float], chosen: KernelConfig) -> None:
    assert kernel_configs.pick(times) == chosen


def test_a_set_with_a_slower_sum_is_not_picked() -> None:
    cublas, ours = [CUBLAS, CUBLAS], [SKINNY, STREAM_K]
    assert kernel_configs.fastest_set([(cublas, 4.0), ([SKINNY, CUBLAS], 4.1), (ours, 3.7)]) == ours
    assert kernel_configs.fastest_set([(cublas, 4.0), (ours, 4.1)]) == cublas
    assert kernel_configs.fastest_set([(cublas, 4.0), (ours, 3.99)]) == cublas


def test_the_next_candidates() -> None:
    times = {
        CUBLAS: 9.0,
        SKINNY: 3.0,
        STREAM_K: 2.0,
        **{KernelConfig("skinny", i): float(i) for i in (4, 5, 6)},
    }
    assert kernel_configs.next_best(times, STREAM_K) == [
        SKINNY,
        KernelConfig("skinny", 5),
        KernelConfig("skinny", 6),
        CUBLAS,
    ]
    assert kernel_configs.next_best({CUBLAS: 1.0, STREAM_K: 2.0}, CUBLAS) == [STREAM_K]
    assert kernel_configs.fastest_triton({CUBLAS: 1.0, SKINNY: 3.0, STREAM_K: 2.0}) == STREAM_K
    assert kernel_configs.fastest_triton({CUBLAS: 1.0}) == CUBLAS


def test_candidates_fit_their_rows() -> None:
    layer = LinearShape(4096, 6144, 32)
    assert {config.kernel for config in kernel_configs.candidates(layer, 1, 2, 132)} == {"skinny"}
    assert {config.kernel for config in kernel_configs.candidates(layer, 4, 2, 132)} == {"skinny", "stream_k"}
    for rows in (3, 8, 16, 17, 48, 64, 100, 256):
        configs = kernel_configs.candidates(layer, rows, 2, 132)
        assert configs
        assert len(set(configs)) == len(configs) <= 12, "each costs a start its time"
        assert all(config.kernel == "stream_k" for config in configs)
        assert all(config.row_tile >= 16 for config in configs)
        sizes = {
            size for config in configs for size in (config.out_tile, config.row_tile, config.in_tile, config.warps)
        }
        assert all(size.bit_count() == 1 for size in sizes), "Triton tiles are powers of two"
        assert all(
            layer.in_features // config.in_tile // config.split >= kernel_configs.FEWEST_STEPS for config in configs
        )
        assert any(config.row_tile >= min(rows, 128) for config in configs)
    assert kernel_configs.candidates(layer, 257, 2, 132) == []
    assert kernel_configs.candidates(layer, 1, 4, 132) == []
    assert kernel_configs.candidates(LinearShape(4097, 6144, 1), 16, 2, 132) == [], (
        "rows that cannot be copied by descriptor"
    )


def test_small_layers_are_split_until_all_sms_are_busy() -> None:
    shape = (64, 16, 128, 5, 4)  # 100 KiB of shared memory: two programs an SM
    assert kernel_configs.splits(LinearShape(4096, 4096, 1), 16, shape, 2, 132) == [1, 2, 4]
    assert kernel_configs.splits(LinearShape(4096, 128256, 1), 16, shape, 2, 132) == [1]
    assert kernel_configs.splits(LinearShape(512, 64, 1), 16, shape, 2, 132) == [1], (
        "no part is shorter than three steps"
    )


def test_a_batch_invariant_config_follows_from_the_layer_alone() -> None:
    config = kernel_configs.batch_invariant_config(LinearShape(4096, 4096, 32), 2, 132)
    assert config.kernel == "stream_k"
    assert config.split == 4
    assert kernel_configs.batch_invariant_config(LinearShape(4096, 4096, 32), 4, 132) == CUBLAS


def test_a_cache_file_round_trip(tmp_path: Path) -> None:
    path = kernel_configs.cache_path("NVIDIA H200", ("torch2.11.0+cu130",), environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert path == tmp_path / "blockyard" / "linear-NVIDIA-H200-torch2.11.0+cu130.json"
    assert kernel_configs.read_cache(path) == []
    experts = ExpertShape(8, 2, 64, 32)
    of_experts = list(expert_configs.candidates(experts, 4))
    entries = [
        TunedConfig(LAYERS, "bfloat16", 1, [SKINNY, CUBLAS]),
        TunedConfig(LAYERS, "bfloat16", 16, [STREAM_K, CUBLAS]),
        TunedConfig(LAYERS, "bfloat16", 16, [CUBLAS, CUBLAS], [experts], of_experts[:1]),
        TunedConfig(LAYERS, "bfloat16", 4, [CUBLAS, CUBLAS], [experts], []),
    ]
    kernel_configs.write_cache(path, entries)
    assert kernel_configs.read_cache(path) == entries
    assert [f.name for f in path.parent.iterdir()] == [path.name]
    assert kernel_configs.find(entries, LAYERS, "bfloat16", 16) == entries[1]
    assert kernel_configs.find(entries, LAYERS, "float16", 16) is None
    assert kernel_configs.find(entries, LAYERS, "bfloat16", 8) is None
    assert kernel_configs.find(entries, LAYERS[:1], "bfloat16", 16) is None
    assert kernel_configs.find(entries, LAYERS, "bfloat16", 16, [experts]) == entries[2]
    assert kernel_configs.find(entries, LAYERS, "bfloat16", 4, [experts]) is None, "configs of experts are missing"


def test_a_new_measurement_replaces_the_old_one() -> None:
    old = [
        TunedConfig(LAYERS, "bfloat16", 1, [SKINNY, CUBLAS]),
        TunedConfig(LAYERS[:1], "bfloat16", 1, [SKINNY]),
    ]
    new = [TunedConfig(LAYERS, "bfloat16", 1, [CUBLAS, CUBLAS])]
    assert kernel_configs.merge(old, new) == [old[1], new[0]]


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1}', b'{"version": "x", "entries": []}', b"\xff\x00"])
def test_a_broken_cache_file_is_measured_anew(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert kernel_configs.read_cache(path) == []
    assert [r.message for r in caplog.records if "measured anew" in r.message]
    kernel_configs.write_cache(path, [TunedConfig(LAYERS, "bfloat16", 1, [SKINNY, CUBLAS])])
    assert len(kernel_configs.read_cache(path)) == 1


def test_another_edition_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(b'{"version": 0, "entries": []}')
    assert kernel_configs.read_cache(path) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "blockyard").write_text("a file where the folder belongs")
    with caplog.at_level(logging.WARNING):
        kernel_configs.write_cache(tmp_path / "blockyard" / "table.json", [])
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.records[0].message
    assert kernel_configs.read_cache(tmp_path / "blockyard" / "table.json") == []


def test_defaults_are_those_of_the_same_form_of_weights() -> None:
    config = kernel_configs.candidates(LinearShape(4096, 6144, 32), 16, 2, 132)[0]
    measured = [kernel_configs.DefaultConfig(4096, 6144, 16, config)]
    for form, want in (("dense", config), ("another", CUBLAS)):
        assert kernel_configs.default_config(measured, LinearShape(4096, 6144, 32, form), 16, [config]) == want
