"""Weights in host memory give the same outputs as weights on the device, and are spread over the layers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_driver import Driver
from tiny_models import BASE, BY_NAME, VOCAB, settings, start

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.layers.cpu_offload import OffloadedMatrix, share_of_layers
from blockyard.services.gpu_worker.loading.checkpoint_check import check_memory
from blockyard.services.gpu_worker.loading.weights import HostShare, WeightTable
from blockyard.services.gpu_worker.memory import GIB
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.quantization import dense
from blockyard.services.gpu_worker.startup.cpu import CpuBackend
from blockyard.services.gpu_worker.startup.cuda import CudaBackend
from blockyard.services.gpu_worker.startup.cuda_link import CudaLink
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG: dict[str, Any] = BASE | {
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 96,
    "num_hidden_layers": 10,
}
LAYER_BYTES = 4 * 64 * (3 * 64 + 64 + 2 * 96 + 96)  # qkv, out, gate and up, down


@pytest.mark.parametrize(
    ("name", "model_impl"),
    [
        ("llama", "auto"),
        ("opt", "auto"),
        ("qwen3-moe", "auto"),
        ("gemma3", "auto"),
        ("deepseek-v3", "auto"),
        ("mistral-window", "transformers"),
    ],
)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_outputs_equal_those_of_weights_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, model_impl: str, share: float
) -> None:
    BY_NAME[name].save(tmp_path)

    def outputs() -> list[list[int]]:
        runner = start(tmp_path, device=DEVICE, max_model_len=128, model_impl=model_impl)
        driver = Driver(runner)
        streams = [
            driver.add(list(range(3, 3 + n)), Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
            for n in (4, 9, 30)
        ]
        driver.run()
        return [stream.output for stream in streams]

    monkeypatch.setattr(dense, "can_pack", lambda weight: False)  # packed matrices are not staged
    plain = outputs()
    copied: list[OffloadedMatrix] = []
    copy = OffloadedMatrix.copy
    monkeypatch.setattr(OffloadedMatrix, "copy", lambda self: (copied.append(self), copy(self))[1])
    monkeypatch.setattr(CpuBackend, "host_share", lambda *given: HostShare(share, share))
    assert outputs() == plain
    assert copied[0] is not copied[1] and len({id(matrix) for matrix in copied}) > 3


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_kernels_are_measured_at_the_start_if_weights_are_replaced_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """HostWeights wraps the kernels that were picked, so none may be picked later."""
    at_once: list[bool] = []
    monkeypatch.setattr(dense, "can_pack", lambda weight: False)
    monkeypatch.setattr(CpuBackend, "pick_products", lambda self, model, config, now, report: at_once.append(now))
    model = find_family(CONFIG)(CONFIG, WeightTable(torch.float32, torch.device("cpu"), HostShare(share)))
    engine.prepare(model, settings(tmp_path, device="cpu"), 64, CpuBackend(), StartReport(lambda *of: None))
    assert at_once == [share > 0]


def test_offloaded_matrices_are_spread_and_within_the_limit() -> None:
    build = find_family(CONFIG)
    gib = 0.25 * 10 * LAYER_BYTES / GIB
    share = share_of_layers(partial(build, CONFIG), torch.float32, gib, free_bytes=GIB)
    assert share.matrices == pytest.approx(0.25)
    table = WeightTable(torch.float32, torch.device("meta"), share)
    model = build(CONFIG, table)
    stays = {id(weight) for weight in table.matrices_on_host}
    places = [i // 4 for i, one in enumerate(model.linears()) if id(one.method.tensors()["weight"]) in stays]
    assert (
        sum(weight.nbytes for weight in table.matrices_on_host)
        <= gib * GIB
        < 1.2 * sum(w.nbytes for w in table.matrices_on_host)
    )
    assert {place // 5 for place in places} == {0, 1}
    assert VOCAB not in {weight.shape[0] for weight in table.matrices_on_host}


MIXTURE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
EXPERT_BYTES = 10 * 4 * 8 * 3 * 64 * 32  # gate and up, down


@pytest.mark.parametrize(("asked", "matrices", "experts"), [(0.5, 0.0, 0.5), (1.0, 0.0, 1.0), (1.2, 0.5, 1.0)])
def test_experts_go_to_host_memory_before_matrices(asked: float, matrices: float, experts: float) -> None:
    """asked: by the bytes of all experts."""
    build = partial(find_family(MIXTURE), MIXTURE)
    whole = WeightTable(torch.float32, torch.device("meta"))
    build(whole)
    assert whole.expert_bytes == EXPERT_BYTES
    asked_bytes = min(asked, 1) * EXPERT_BYTES + matrices * whole.matrix_bytes
    share = share_of_layers(build, torch.float32, asked_bytes / GIB, free_bytes=GIB)
    assert (share.matrices, share.experts) == pytest.approx((matrices, experts), abs=1e-4)
    assert share.bytes_of(whole) == pytest.approx(asked_bytes, rel=1e-4)
    table = WeightTable(torch.float32, torch.device("meta"), share)
    build(table)
    assert sum(one.nbytes for one in table.experts_on_host) == pytest.approx(experts * EXPERT_BYTES, rel=0.1)
    assert bool(table.matrices_on_host) == bool(matrices)
    assert table.size_bytes == whole.size_bytes


def test_experts_that_do_not_fit_are_refused_with_what_to_keep_in_host_memory() -> None:
    table = WeightTable(torch.float32, torch.device("meta"))
    find_family(MIXTURE)(MIXTURE, table)
    with pytest.raises(LoadError, match=r"--cpu-offload-gb 1 or more would keep enough"):
        check_memory(table, 0, 16, 64, CudaLink(torch.device("cuda")), table.size_bytes - EXPERT_BYTES // 2)
    check_memory(table, EXPERT_BYTES // 2, 16, 64, CudaLink(torch.device("cuda")), table.size_bytes - EXPERT_BYTES // 2)


def test_all_layers_at_most(tmp_path: Path) -> None:
    build = find_family(CONFIG)
    assert share_of_layers(partial(build, CONFIG), torch.float32, 5.0, free_bytes=6 * GIB) == HostShare(1.0)
    with pytest.raises(LoadError, match=r"--cpu-offload-gb 0.001: 0\.00 GiB of host memory are free"):
        share_of_layers(partial(build, CONFIG), torch.float32, 0.001, free_bytes=10_000)
    with pytest.raises(LoadError, match=r"--cpu-offload-gb 1e-06: no matrix is so small; layers have 0\.0012"):
        share_of_layers(partial(build, CONFIG), torch.float32, 1e-6, free_bytes=GIB)


def test_the_flag_gives_the_offloaded_share_and_nothing_is_offloaded_on_cpu(tmp_path: Path) -> None:
    config = settings(tmp_path, cpu_offload_gib=0.25 * 10 * LAYER_BYTES / GIB)
    shares = [
        backend.host_share(partial(find_family(CONFIG), CONFIG), torch.float32, config)
        for backend in (CudaBackend(torch.device("cuda", 0)), CpuBackend())
    ]
    assert [share.matrices for share in shares] == [pytest.approx(0.25), 0.0]


def test_on_cpu_the_flag_only_prints_a_note(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    seen: list[str] = []
    runner = engine.start(
        settings(tmp_path, device="cpu", cpu_offload_gib=1.0), lambda phase, progress, notes: seen.extend(notes)
    )
    assert not runner.model.table.matrices_on_host
    assert "weights in host memory: all, this is a CPU (--cpu-offload-gb)" in seen


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_offload_by_the_flag_with_cuda_graphs(tmp_path: Path, name: str) -> None:
    BY_NAME[name].save(tmp_path)
    outputs = []
    for gib in (0.0, 0.0001):
        runner = start(tmp_path, device="cuda", max_model_len=128, cpu_offload_gib=gib)
        table = runner.model.table
        assert bool(table.experts_on_host if name == "qwen3-moe" else table.matrices_on_host) == bool(gib)
        driver = Driver(runner)
        stream = driver.add([5, 9, 3], Sampling(max_tokens=40, temperature=0.0, ignore_eos=True))
        driver.run()
        outputs.append(stream.output)
    assert outputs[0] == outputs[1]
