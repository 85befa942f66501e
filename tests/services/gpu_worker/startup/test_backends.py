"""The choice of a backend, and the memory that each plans with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
import torch.cuda.nccl
from tiny_models import model_shape, settings

from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses
from blockyard.services.gpu_worker.memory import KVMemoryNeed, MemoryPlan
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.sums.sum_cache import SumCache
from blockyard.services.gpu_worker.startup import cuda
from blockyard.services.gpu_worker.startup.backend import pick_backend
from blockyard.services.gpu_worker.startup.cpu import CpuBackend
from blockyard.services.gpu_worker.startup.cuda import CudaBackend
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.services.kv_transfer.host.host_store import STAGING_BYTES
from blockyard.shared.config.services.worker import KVTransferConfig
from blockyard.shared.errors import LoadError

GIB = 1 << 30
GPU = torch.device("cuda", 0)
NEED = KVMemoryNeed(block_size=16, block_bytes=1 << 20, max_model_len=64, max_num_seqs=4)
NIXL = KVTransferConfig(connector="nixl")


class FakeModel:
    """Its steps are not run: `small_gpu` replaces what would."""


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """A GPU of 10 GiB with 2 GiB of weights: a step takes 1 GiB, graphs 512 MiB and penalties 256 MiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(cuda, "peak_bytes", lambda *_, **__: GIB)
    monkeypatch.setattr(
        cuda.cuda_steps, "graph_bytes", lambda *_, captures, has_adapters: ((512 << 20) if captures else 0, 256 << 20)
    )
    return CudaBackend(GPU)


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(pick_backend("auto"), CpuBackend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(pick_backend("cpu"), CpuBackend)
    for name in ("auto", "cuda"):
        chosen = pick_backend(name)
        assert isinstance(chosen, CudaBackend) and chosen.device == GPU


def test_the_cpu_ends_processes_that_would_compile_kernels() -> None:
    class Processes(CompileProcesses):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    processes = Processes(1)
    note = CpuBackend().set_up(torch.get_num_threads(), processes)
    assert processes.is_closed and note == f"device: cpu, {torch.get_num_threads()} compute threads"


def test_only_a_gpu_refuses_shapes() -> None:
    odd = model_shape(2, 2, 7, 1.0, [None])
    CpuBackend().check_shape(odd)
    with pytest.raises(LoadError, match="a head size of 7 is not supported on a GPU"):
        CudaBackend(GPU).check_shape(odd)


def test_buffers_of_copies_are_in_the_memory_of_a_gpu_alone() -> None:
    none, some = MemoryPlan(0, []), MemoryPlan(8, [])
    assert CpuBackend().moving_bytes(some, NIXL) == 0
    assert [CudaBackend(GPU).moving_bytes(*given) for given in ((none, None), (some, None), (none, NIXL))] == [
        0,
        STAGING_BYTES,
        GIB,
    ]


@pytest.mark.parametrize(
    ("fields", "num_blocks"),
    [
        ({}, 9 * 1024 - 2 * 1024 - 1024 - 512 - 256 - 128),
        ({"enforce_eager": True}, 9 * 1024 - 2 * 1024 - 1024 - 256 - 128),
        ({"kv_cache_memory_bytes": 3 * GIB}, 3 * 1024),
        ({"num_gpu_blocks_override": 77, "kv_cache_memory_bytes": 3 * GIB}, 77),
    ],
)
def test_blocks_of_a_gpu(tmp_path: Path, small_gpu: CudaBackend, fields: dict[str, Any], num_blocks: int) -> None:
    given = {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.9} | fields
    plan = small_gpu.plan_memory(FakeModel(), NEED, torch.bfloat16, settings(tmp_path, **given), 128 << 20)  # type: ignore[arg-type]
    assert plan.num_blocks == num_blocks


@pytest.mark.parametrize(
    ("fields", "has_latent", "graphs_mib"),
    [
        ({}, False, 1024 + 12 * 24),  # the activations of one step, 11 sizes of graphs, the largest has two
        ({"max_num_batched_tokens": 64}, False, 1024 + 3 * 24),
        ({"enforce_eager": True}, False, 0),
        ({"batch_invariant": True}, False, 0),
        ({"cpu_offload_gib": 1.0}, False, 0),
        ({"tensor_parallel_size": 2}, False, 0),
        ({"expert_replicas": 2}, False, 0),
        ({}, True, 0),
    ],
)
def test_blocks_beside_the_graphs_of_a_model_that_pools(
    tmp_path: Path, small_gpu: CudaBackend, fields: dict[str, Any], has_latent: bool, graphs_mib: int
) -> None:
    model: Any = SimpleNamespace(shape=SimpleNamespace(has_latent=has_latent))
    given = {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.9, "task": "embed"} | fields
    plan = small_gpu.plan_memory(model, NEED, torch.bfloat16, settings(tmp_path, **given), 128 << 20, generates=False)
    assert plan.num_blocks == 9 * 1024 - 2 * 1024 - 1024 - graphs_mib - 128


def test_more_kv_memory_than_a_gpu_has_left(tmp_path: Path, small_gpu: CudaBackend) -> None:
    config = settings(tmp_path, num_gpu_blocks_override=None, kv_cache_memory_bytes=7 * GIB)
    with pytest.raises(LoadError, match=f"there is room for {int(6.25 * GIB)}"):
        small_gpu.plan_memory(FakeModel(), NEED, torch.bfloat16, config, 0)  # type: ignore[arg-type]


def test_a_step_that_does_not_fit_beside_the_weights(
    tmp_path: Path, small_gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda, "peak_bytes", fails)
    with pytest.raises(LoadError, match="for a step of 2048 tokens beside the weights; lower --max-num-batched-tokens"):
        small_gpu.plan_memory(FakeModel(), NEED, torch.bfloat16, settings(tmp_path), 0)  # type: ignore[arg-type]


def test_the_number_of_sequences_follows_the_memory_of_a_gpu(tmp_path: Path, small_gpu: CudaBackend) -> None:
    config = settings(tmp_path, num_gpu_blocks_override=None, block_size=16, max_num_seqs=1024, fit_max_num_seqs=True)
    fitted = small_gpu.fit_num_seqs(config, 1 << 20)  # 7 GiB of 0.9 x 10 - 2: 7,168 blocks of 16 tokens
    assert fitted == msgspec.structs.replace(config, max_num_seqs=256)
    assert small_gpu.fit_num_seqs(config, 1 << 18).max_num_seqs == 7 * 4096 * 16 // 512 // 64 * 64
    asked = msgspec.structs.replace(config, fit_max_num_seqs=False)
    assert small_gpu.fit_num_seqs(asked, 1 << 20) is asked
    assert CpuBackend().fit_num_seqs(config, 1 << 20) is config


@pytest.mark.parametrize("asked", [True, False])
def test_ranks_sum_by_kernels_unless_a_flag_forbids_it(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """--disable-custom-all-reduce."""
    kernels, chosen = SimpleNamespace(), list[tuple[int, bool]]()

    def choose(
        group: RankGroup, folder: Path, width: int, dtype: torch.dtype, note: object, *, in_order: bool, cache: SumCache
    ) -> SimpleNamespace:
        chosen.append((width, in_order))
        return kernels

    monkeypatch.setattr(cuda, "choose_sums", choose)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    linears = [SimpleNamespace(is_partial=False, shape=(8, 16)), SimpleNamespace(is_partial=True, shape=(16, 8))]
    model: Any = SimpleNamespace(linears=lambda: linears, table=SimpleNamespace(dtype=torch.bfloat16))
    ranks = RankGroup(Shard(0, 2), cast("Any", None), GPU)
    config = settings(Path("model"), custom_all_reduce=asked, batch_invariant=True, tensor_parallel_size=2)
    for _ in range(2):  # again after deep sleep
        CudaBackend(GPU).pick_sums(model, ranks, config, StartReport(lambda phase, done, notes: None))
    assert chosen == [(8, True)] * asked
    assert ranks.kernels is (kernels if asked else None)
