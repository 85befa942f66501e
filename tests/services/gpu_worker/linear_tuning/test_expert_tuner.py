"""Tuned experts with a fake timer; without a GPU, products run in Triton's interpreter."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import quick_interpreter  # noqa: F401, before kernels are imported
import torch
from msgspec.structs import replace

from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.linear import dense_linear
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, candidates
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
from blockyard.services.gpu_worker.linear_tuning import expert_tuner
from blockyard.services.gpu_worker.linear_tuning import products as linear_products
from blockyard.services.gpu_worker.linear_tuning.expert_tuner import ExpertTuner, fastest
from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner
from blockyard.services.gpu_worker.quantization.dense import UnquantizedExperts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUTING = Routing(num_experts=4, top_k=2)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[GroupedExperts]:
    """Three layers of two shapes."""
    torch.zeros(1, device=DEVICE)  # initialises CUDA, which reads the real properties
    properties = SimpleNamespace(multi_processor_count=4, name="none", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(linear_products, "WORKSPACE_ELEMENTS", 1 << 16)
    return [make(16), make(48), make(16)]


def make(inner: int, device: str = DEVICE) -> GroupedExperts:
    """device: that multiplies."""
    gate_up = torch.randn(4, 2 * inner, 32, device=DEVICE, dtype=torch.float16) / 5
    down = torch.randn(4, 32, inner, device=DEVICE, dtype=torch.float16) / 5
    weights = ExpertWeights(
        gate_up=UnquantizedExperts(gate_up), down=UnquantizedExperts(down), device=torch.device(device)
    )
    return GroupedExperts(weights, ROUTING, Gate.SILU, scales_input=False)


def used(layer: GroupedExperts) -> dict[int, ExpertConfig]:
    return dict(layer._measured)


def fake_times(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The last candidate is the fastest for more than one row, the first one otherwise. Returns the rows it timed."""
    timed: list[int] = []

    def seconds(config: ExpertConfig, shape: object, rows: int) -> float:
        timed.append(rows)
        return 2.0 if (config == candidates(shape, rows)[-1]) == (rows == 1) else 1.0

    monkeypatch.setattr(tuner, "compile", lambda sizes: None)
    monkeypatch.setattr(tuner, "candidates", lambda layer, rows: [])
    monkeypatch.setattr(tuner._experts, "seconds", seconds)
    return timed


def test_measured_configs_are_used_and_kept_in_the_cache_file_of_linear_layers(
    layers: list[GroupedExperts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linears = [dense_linear(torch.randn(32, 32, device=DEVICE, dtype=torch.float16))]
    tuner = Tuner(linears, layers, device=torch.device(DEVICE), dtype=torch.float16)
    timed = fake_times(tuner, monkeypatch)
    tuner.tune([1, 8], lambda done: None, tmp_path, most_tokens=1024)
    rows = [1, 8, 512, 1024]
    assert sorted(set(timed)) == rows
    assert [sorted(used(layer)) for layer in layers] == [rows] * 3
    for layer in layers:
        assert used(layer)[1] == candidates(layer.shape, 1)[0]
        assert used(layer)[512] == candidates(layer.shape, 512)[-1]
        layer.use({})
    again = Tuner(linears, layers, device=torch.device(DEVICE), dtype=torch.float16)
    timed = fake_times(again, monkeypatch)
    assert "as measured before" in again.tune([1, 8], lambda done: None, tmp_path, most_tokens=1024)
    assert not timed and used(layers[1])[1024] == candidates(layers[1].shape, 1024)[-1]


def test_every_candidate_has_the_same_products(layers: list[GroupedExperts]) -> None:
    layer = layers[1]
    for rows in (1, 3, 40):
        x, experts, weights = expert_tuner._inputs(layer, rows)
        assert len(experts.unique()) > 1
        want = layer.forward(x, experts, weights, None)
        assert want is not None
        for config in candidates(layer.shape, rows):
            got = layer.forward_with(config, x, experts, weights)
            assert got is not None and torch.allclose(got.float(), want.float(), rtol=2e-2, atol=2e-3), config
            residual = torch.randn_like(x)
            total = residual.clone()
            delta = layer.forward_with(config, x, experts, weights, total)
            add_rms_norm(total, delta, torch.ones_like(x[0]), 1e-6)
            assert torch.allclose(total.float(), residual.float() + want.float(), rtol=2e-2, atol=4e-3), config


def test_a_measurement_reads_weights_that_are_not_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row reads two of four experts: 6 KiB of a layer."""
    read: list[GroupedExperts] = []

    def forward_with(self: GroupedExperts, *_: object) -> None:
        read.append(self)

    monkeypatch.setattr(GroupedExperts, "forward_with", forward_with)
    monkeypatch.setattr(expert_tuner, "replay_seconds", lambda step: 1.0)
    monkeypatch.setattr(expert_tuner, "WEIGHT_BYTES", 20 << 10)
    tuner = ExpertTuner([make(16) for _ in range(6)])
    [shape] = tuner.shapes
    for rows, num_layers in ((1, 4), (64, 2)):
        read.clear()
        assert tuner.seconds(candidates(shape, rows)[0], shape, rows) == 1 / num_layers
        assert len(set(map(id, read))) == len(read) == num_layers


def test_measuring_does_not_count_as_load(layers: list[GroupedExperts]) -> None:
    load = torch.full((4,), 7, dtype=torch.int32, device=DEVICE)
    layers[0]._load = load
    ExpertTuner(layers[:1]).launch_candidates(4)
    assert load.tolist() == [7] * 4


def test_experts_in_host_memory_are_not_measured() -> None:
    assert ExpertTuner([make(16, device="cuda" if DEVICE == "cpu" else "cpu")]).shapes == []


def test_the_first_config_is_kept_when_in_doubt() -> None:
    one = ExpertConfig("grouped", (64, 64, 4, 4), (64, 64, 4, 4), 16)
    other, third = replace(one, tile=32), replace(one, tile=64)
    assert fastest({one: 1.0, other: 0.99}) == one
    assert fastest({one: 1.0, other: 0.9, third: float("inf")}) == other
    assert fastest({one: float("inf"), other: 3.0}) == other
