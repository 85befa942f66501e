"""Sums of ranks by kernels: what they take, where they stand in a model, and that a lost part is an error."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from gpu_ranks import run_processes, sum_by_kernels, sum_in_symmetric_memory

from blockyard.kernels.all_reduce.peer_buffers import PeerBuffers, empty_buffer, make_buffers
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceMirror
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.layers.fused_ops import SummedOps, TorchOps
from blockyard.services.gpu_worker.layers.linear import dense_linear
from blockyard.services.gpu_worker.layers.norm import NoNorm
from blockyard.services.gpu_worker.parallel.peer_memory import PeerMemory
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.stages import place_of
from blockyard.services.gpu_worker.parallel.sums import sum_measurement
from blockyard.services.gpu_worker.parallel.sums.peer_sums import PeerSums
from blockyard.services.gpu_worker.parallel.sums.sum_cache import SumCache
from blockyard.services.gpu_worker.parallel.sums.sum_measurement import SumMeasurement, choose_sums
from blockyard.services.gpu_worker.parallel.sums.sum_table import SIZES, SumTable, SumWay, same_way
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.services.gpu_worker.ranks.leader_team import ENVIRONMENT
from blockyard.shared.errors import RankLostError

HALF_BYTES, EPS = 1 << 16, 1e-5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUP = cast("Any", SimpleNamespace())  # of a rank that waits for nobody


class OwnMemory:
    """The buffer of the only rank of a group."""

    def __init__(self, num_ranks: int = 1) -> None:
        self._own = [empty_buffer(HALF_BYTES, DEVICE) for _ in range(num_ranks)]
        addresses = [one.data_ptr() for one in self._own]
        self.device = DEVICE
        self.buffers: PeerBuffers = make_buffers(0, addresses, HALF_BYTES, DEVICE, most_polls=3)

    check = PeerMemory.check


def sums(memory: OwnMemory, way: SumWay = SumWay.ONE_STEP, most_bytes: int = 1 << 30) -> RankGroup:
    """A group of one rank that sums by kernels."""
    group = RankGroup(Shard(), GROUP, DEVICE)
    group.kernels = PeerSums(cast("PeerMemory", memory), None, same_way(way, most_bytes))
    return group


def test_layers_sum_and_normalise_in_one_kernel() -> None:
    group, plain = sums(OwnMemory()), TorchOps()
    ops, norm = SummedOps(plain, group), RMSNorm(torch.rand(24, device=DEVICE) + 0.5, EPS)
    residual, delta = torch.randn(2, 3, 24, device=DEVICE)
    experts = torch.randn(3, 2, 24, device=DEVICE)
    linear = dense_linear(torch.randn(5, 24, device=DEVICE))
    refused = SummedOps(plain, sums(OwnMemory(), SumWay.TRANSPORT))
    for one in (delta, experts):
        mine, theirs = residual.clone(), residual.clone()
        torch.testing.assert_close(ops.add_norm(mine, one, norm), plain.add_norm(theirs, one, norm))
        torch.testing.assert_close(mine, theirs)
        mine, theirs = residual.clone(), residual.clone()
        got, wanted = (each.norm_then_linear(linear, to, one, norm) for each, to in ((ops, mine), (plain, theirs)))
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(ops.sum_norm(residual, delta, norm), plain.sum_norm(residual, delta, norm), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(ops.add_norm(residual.clone(), delta, NoNorm()), residual + delta)
    assert torch.equal(ops.add_norm(residual.clone(), None, norm), norm(residual))
    assert group.sum_add_rms_norm(delta, residual, norm.weight, EPS) is not None
    with group.alone():
        assert group.sum_add_rms_norm(delta, residual, norm.weight, EPS) is None
    with pytest.raises(AttributeError, match="allgather"):  # of the transport
        refused.add_norm(residual, delta, norm)


@pytest.mark.parametrize("way", [SumWay.ONE_STEP, SumWay.TWO_STEPS])
def test_kernels_take_what_fits_their_buffers(way: SumWay) -> None:
    kernels = sums(OwnMemory(), way, most_bytes=HALF_BYTES).kernels
    assert kernels is not None
    part = torch.randn(4, 100, device=DEVICE)
    for one in (part, part.t(), part[:, ::2]):
        total = kernels.sum(one.clone(memory_format=torch.preserve_format))
        assert total is not None
        assert torch.equal(total, one)
    for one in (part[:0], part.double(), part.int(), torch.zeros(HALF_BYTES // 4 + 1, device=DEVICE)):
        assert kernels.sum(one) is None
    row = torch.zeros(1, 40000, device=DEVICE, dtype=torch.float16)
    assert kernels.sum_add_rms_norm(row, row, row[0], EPS) is None, "a program holds a row"


def test_a_part_that_does_not_come_is_an_error_of_the_step() -> None:
    memory = OwnMemory(num_ranks=2)
    kernels = PeerSums(cast("PeerMemory", memory), None, same_way(SumWay.ONE_STEP, 1 << 20))
    group = RankGroup(Shard(), GROUP, DEVICE)
    group.kernels = kernels
    done = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
    mirror = DeviceMirror(lambda frame, to=None: None, RankGroups(place_of(0, 1, 1), group, group), SameMemory())
    event = mirror.checked(cast("Any", done))
    assert event.query()
    kernels.sum(torch.ones(8, device=DEVICE))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(RankLostError, match="did not get the part"):
        event.query()
    with pytest.raises(RankLostError, match="did not get the part"):
        event.synchronize()


@pytest.mark.parametrize("is_leader", [True, False])
def test_all_ranks_have_the_table_that_the_leader_has_measured(
    is_leader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SumTable(SIZES, (SumWay.TRANSPORT,) * len(SIZES), (SumWay.ONE_STEP,) * len(SIZES))

    def copy_from_leader(words: torch.Tensor) -> None:
        if not is_leader:
            words.copy_(torch.tensor(told.encode()))

    def seconds(group: RankGroup, call: Callable[[], object], device: torch.device) -> float:
        return 1.0 if isinstance(getattr(getattr(call, "func", None), "__self__", None), PeerSums) else 2.0

    group = RankGroup(Shard(0 if is_leader else 1, 2), GROUP, torch.device("cpu"))
    monkeypatch.setattr(group, "copy_from_leader", copy_from_leader)
    monkeypatch.setattr(sum_measurement, "_time", seconds)
    memory = cast("PeerMemory", OwnMemory(num_ranks=2))
    found = SumMeasurement(group, memory, None, 64, torch.float16)
    for sums in (found.quickest(), found.in_order()):
        assert sums.describe() == (
            "sums of ranks: one step to 16 KiB, transport to 32 MiB; with a norm: one step to 16 KiB, "
            "transport to 32 MiB"
            if is_leader
            else told.describe()
        )
    of_three = RankGroup(Shard(0, 3), GROUP, torch.device("cpu"))
    in_order = SumMeasurement(of_three, memory, None, 64, torch.float16).in_order()
    for rows in (1, 60):
        assert in_order.way(torch.zeros(rows, 64), has_norm=True) is SumWay.ONE_STEP


def test_a_second_start_installs_the_leaders_table_without_a_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, path, measured = list[torch.Tensor](), tmp_path / "folder" / "sums.json", list[int]()

    def seconds(group: RankGroup, call: Callable[[], object], device: torch.device) -> float:
        measured.append(group.rank)
        return 1.0 if isinstance(getattr(getattr(call, "func", None), "__self__", None), PeerSums) else 2.0

    def start(rank: int, file: Path = path, width: int = 64) -> str:
        def copy_from_leader(words: torch.Tensor) -> None:
            if rank == 0:
                told.append(words.clone())
            else:
                words.copy_(told.pop(0))

        group, lines = RankGroup(Shard(rank, 2), GROUP, torch.device("cpu")), list[str]()
        monkeypatch.setattr(group, "copy_from_leader", copy_from_leader)
        monkeypatch.setattr(group, "least", lambda value: 0)
        measured.clear()
        found = choose_sums(
            *(group, tmp_path, width, torch.float16, lines.append), in_order=False, cache=SumCache(file)
        )
        assert found is not None and lines == [found.describe() + ", as measured before" * (not measured)]
        return found.describe()

    def no_symmetric(*_: object) -> None:
        raise RuntimeError("no symmetric memory")

    monkeypatch.setattr(sum_measurement, "PeerMemory", lambda *_: OwnMemory(num_ranks=2))
    monkeypatch.setattr(sum_measurement, "SymmetricSums", no_symmetric)
    monkeypatch.setattr(sum_measurement, "_time", seconds)
    monkeypatch.setattr(sum_measurement, "_load_kernels", lambda *_: None)  # they need the other rank
    first = start(0)
    assert set(measured) == {0} and first == start(1, tmp_path / "nothing here")
    assert set(measured) == {1} and not (tmp_path / "nothing here").exists(), "the leader alone keeps what it measured"
    assert (start(0), measured) == (first, [])
    assert (start(1, tmp_path / "nothing here"), measured, told) == (first, [], [])
    start(0, width=128)
    assert measured, "rows of another width"
    told.clear()
    assert (start(0), measured) == (first, []), "tables of other widths are kept"
    for broken in (
        "{",
        path.read_text().replace('"alone": [', '"alone": [9,'),
        path.read_text().replace("16384", "16385"),
    ):
        path.write_text(broken)
        caplog.clear()
        assert start(0) == first and measured
        assert ("measured anew" in caplog.text) == ("16385" not in broken)


@pytest.mark.parametrize("refused", ["", "peer access is not supported"])
def test_gpus_that_do_not_reach_each_other_are_a_line(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_memory(group: RankGroup, device: torch.device, half_bytes: int) -> OwnMemory:
        if refused:
            raise OSError(refused)
        return OwnMemory(num_ranks=3)

    def no_symmetric(*_: object) -> None:
        raise RuntimeError("no symmetric memory")

    monkeypatch.setattr(sum_measurement, "PeerMemory", open_memory)
    monkeypatch.setattr(sum_measurement, "SymmetricSums", no_symmetric)
    group, lines = RankGroup(Shard(0, 3), GROUP, torch.device("cpu")), list[str]()
    monkeypatch.setattr(group, "least", lambda value: value)
    found = choose_sums(group, Path(), 64, torch.float16, lines.append, in_order=True)
    assert (found is None) == bool(refused)
    [line] = lines
    assert (refused if refused else "one step to") in line


def test_ranks_that_share_a_gpu_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum takes as long as the driver takes to switch between processes, and the transport is in no graph."""
    monkeypatch.setattr(sum_measurement, "PeerMemory", lambda *_: OwnMemory(num_ranks=2))
    group, lines = RankGroup(Shard(0, 2), GROUP, DEVICE, shares_gpu=True), list[str]()
    found = choose_sums(group, Path(), 64, torch.float16, lines.append, in_order=False)
    assert found is not None
    assert found.way(torch.zeros(HALF_BYTES // 8, dtype=torch.float16), has_norm=False) is SumWay.ONE_STEP
    assert lines == ["sums of ranks: one step to 32 KiB; with a norm: one step to 32 KiB"]


@pytest.mark.cuda
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("size", [2, 4])
def test_processes_that_share_gpus(size: int, tmp_path: Path) -> None:
    run_processes(sum_by_kernels, [(rank, size, tmp_path) for rank in range(size)])


@pytest.mark.cuda
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_symmetric_memory_of_processes_that_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    run_processes(sum_in_symmetric_memory, [(rank, tmp_path) for rank in range(2)])
