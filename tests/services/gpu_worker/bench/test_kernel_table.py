"""The rows of the kernel table, with clocks and sizes that need no GPU: each kernel is called as it will be timed."""

from collections.abc import Callable, Sequence

import pytest
import torch

from blockyard.kernels.lora.adapter_table import add_adapters_reference
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.bench import adapters, experts, latent, sampling, small, timing
from blockyard.services.gpu_worker.bench import row as row_file
from blockyard.services.gpu_worker.bench.row import Ceilings, Row, row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes 10 us; ceilings are round numbers."""

    def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return 1e-5

    monkeypatch.setattr(row_file, "ceilings", lambda: Ceilings(4e12, 4e12, 800e12, 1e-6))
    for file in (adapters, small, sampling, latent, experts):
        monkeypatch.setattr(file, "graph_seconds", graph_seconds)
        monkeypatch.setattr(file, "copies", lambda num_bytes, most=1: 1)
        monkeypatch.setattr(file, "ROWS", (2,), raising=False)
        monkeypatch.setattr(file, "DEVICE", DEVICE)
    monkeypatch.setattr(sampling, "VOCAB", 260)


def test_a_kernel_is_compared_with_the_slower_ceiling() -> None:
    assert row("a", "s", 1e-5, 4e6, 1e6) == Row("a", "s", pytest.approx(10), "400 GB/s", pytest.approx(0.1))
    assert row("b", "s", 1e-5, 4e6, 4e9) == Row("b", "s", pytest.approx(10), "400 TFLOP/s", pytest.approx(0.5))


@pytest.mark.filterwarnings("ignore")
def test_all_small_kernels_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HIDDEN": 64, "INNER": 48, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16, "ENCODER_HIDDEN": 40}
    for name, value in (sizes | {"ENCODER_ROWS": (3,)}).items():
        monkeypatch.setattr(small, name, value)
    monkeypatch.setattr(small, "DTYPE", torch.float16)  # bfloat16 only on a GPU
    assert [one.shape for one in small.measure()] == [
        "2 x 64",
        "2 x 64",
        "2 x 96",
        "2 x 8 x 16",
        "2 x 8 x 16",
        "2 x 6 x 16",
        "3 x 40",
    ]


def test_all_sampling_kernels_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "DTYPE", torch.float16)
    rows = sampling.measure()
    assert len({one.name for one in rows}) == len(rows) == 10
    assert all(one.us == pytest.approx(10) for one in rows)
    assert rows[0].rate == f"{2 * 260 * 2 / 1e-5 / 1e9:,.0f} GB/s"


@pytest.mark.filterwarnings("ignore")
def test_all_kernels_of_latent_attention_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"LATENT": 16, "ROTATED": 4, "PLAIN": 8, "VALUE": 8, "PRODUCT_ROWS": (2,), "LONGEST": 64}
    cases = {"DECODES": ((2, 20, 3),), "PREFILLS": ((0, 9, 3),), "PIECES": ((20, 9, 3),)}
    for name, value in (sizes | cases).items():
        monkeypatch.setattr(latent, name, value)
    monkeypatch.setattr(latent, "DTYPE", torch.float16)
    rows = latent.measure()
    assert len({(one.name, one.shape) for one in rows}) == len(rows) == 8
    assert rows[0].rate == f"{2 * 20 * 20 * 2 / 1e-5 / 1e9:,.0f} GB/s"


def test_all_kernels_of_experts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HIDDEN": 48, "INNER": 32, "ROUTED_ROWS": (2,), "ROWS_ALONE": (1, 5, 17), "ROWS": (2, 64), "SKEWED": 1}
    sizes |= {"ROUTERS": ((4, 32),), "ROUTER_ROWS": (1, 5)}
    for name, value in (sizes | {"ROUTING": Routing(num_experts=6, top_k=2)}).items():
        monkeypatch.setattr(experts, name, value)
    monkeypatch.setattr(experts, "DTYPE", torch.float16)
    rows = experts.measure()
    assert len({(one.name, one.shape) for one in rows}) == len(rows) == 12
    assert rows[3].shape == "1 rows, even, 2 experts hit" and rows[4].name == "down of experts"


def test_adapters_are_measured_alone_and_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = adapters.LayerWidths("qkv", 48, (32, 16, 16)), adapters.LayerWidths("down", 64, (24,))
    experts = adapters.LayerWidths("gate and up", 48, (24, 24), 5), adapters.LayerWidths("down", 24, (48,), 5)
    fields = {"LAYERS": layers, "CASES": ((1, 1), (4, 2)), "RANK": 3, "DTYPE": torch.float16}
    for name, value in (fields | {"EXPERT_LAYERS": experts, "EXPERT_CASES": ((1, 1), (4, 2)), "TOP_K": 2}).items():
        monkeypatch.setattr(adapters, name, value)
    *rows, gate_up, down, _, _ = adapters.measure()
    of_experts = 2 * (2 * 3 * (2 * 48 + 48) + 48 + 2 * 2 * 48), 2 * (2 * 3 * (24 + 48) + 2 * 24 + 2 * 2 * 48)
    assert [gate_up.rate, down.rate] == [f"{one / 1e-5 / 1e9:,.0f} GB/s" for one in of_experts]
    assert gate_up.shape == "1 rows, 2 of adapters and experts hit, 1 adapter of rank 3"
    assert [one.shape.partition(",")[0] for one in rows] == ["1 x 48 x 64", "1 x 64 x 24", "4 x 48 x 64", "4 x 64 x 24"]
    assert rows[2].shape.endswith("2 adapters of rank 3")
    num_bytes = 2 * (3 * (3 * 48 + 64) + 48 + 2 * 64)
    assert rows[0].rate == f"{num_bytes / 1e-5 / 1e9:,.0f} GB/s"
    table = adapters.make_table(layers[0], 2)
    x, out = torch.randn(3, 48).half(), torch.zeros(3, 64).half()
    add_adapters_reference(x, torch.tensor([1, 0, -1], dtype=torch.int32), table, out)
    assert out[:2].count_nonzero() == 128 and not out[2].any()


def test_inputs_rotate_over_more_memory_than_the_cache() -> None:
    assert timing.copies(65 << 20) * (65 << 20) >= timing.CACHE_BYTES
    assert timing.copies(1) == 64
    assert timing.copies(1 << 40) == 2
