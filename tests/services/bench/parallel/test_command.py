"""The order of rows, and what happens to the others if one fails; on servers with mock workers."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rig import serve as rig_serve

from blockyard.services.bench.load.results import BenchError
from blockyard.services.bench.parallel import measures, rank_sums, run
from blockyard.services.bench.parallel.command import main
from blockyard.services.bench.parallel.measures import ParallelSizes
from blockyard.services.bench.parallel.run import BenchMachine, ModelRun, TimeLimits
from blockyard.services.bench.parallel.tables import plans_of
from blockyard.services.bench.suite import served, shapes
from blockyard.services.bench.suite.served import SuiteServer
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import DeviceRates, SumTime

SIZES = ParallelSizes(
    runs=1, stream=(8, 30), many=4, many_len=(8, 30), sums=(16 << 10,), prompt=32, streams=2, streams_len=(8, 4)
)
TIMES_S = (1e-4, 2e-4)  # of a sum


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sequence[str]]]:
    """The flags of all starts. Pipelines do not start."""
    started: list[Sequence[str]] = []
    with rig_serve("demo", "--worker-cls", "mock", "--mock-step-ms", "2") as running:

        @contextlib.contextmanager
        def serve(model: Path, flags: Sequence[str], log: Path, most_s: float) -> Iterator[SuiteServer]:
            started.append(flags)
            if "--pipeline-parallel-size" in flags:
                raise BenchError("the server ended\nand said\nwith a long log\n")
            yield SuiteServer(running.url, running.launched_s)

        monkeypatch.setattr(run, "serve", serve)
        yield started


def sums_of(num_ranks: int, sizes: Sequence[int], *_: object, **__: object) -> tuple[DeviceRates, list[SumTime]]:
    return DeviceRates("CPU", 4e10), [SumTime("gloo", size, *TIMES_S) for size in sizes]


def machine(tmp_path: Path, limit_s: float = 100.0) -> BenchMachine:
    return BenchMachine(SIZES, ("--device", "cpu"), tmp_path, tmp_path, TimeLimits(limit_s, 60.0))


def rows(tmp_path: Path, layouts: str, *items: str, limit_s: float = 100.0) -> list[list[str]]:
    """Returns the item, the layout and what is measured."""
    [plan] = plans_of("demo", items, layouts.split(","))
    cells = [str(row).split(" | ") for row in ModelRun(machine(tmp_path, limit_s), plan).rows()]
    return [[found[1].split(":")[0], *found[2:4]] for found in cells]


def test_a_layout_that_does_not_start_is_a_row_for_each_of_its_figures(
    starts: list[Sequence[str]], tmp_path: Path
) -> None:
    found = rows(tmp_path, "one,tp2,pp2", "start", "kv-blocks", "ttft")
    assert [row[:2] for row in found] == [
        [item, layout] for layout in ("one", "tp2", "pp2") for item in ("ttft", "kv-blocks", "start")
    ]
    assert {row[2] for row in found[6:]} == {"failed: the server ended with a long log"}
    assert all(row[2].endswith((" ms", " blocks", " s")) for row in found[:6])
    assert [flags[3:5] for flags in starts[2:4]] == [["--tensor-parallel-size", "2"]] * 2
    assert len(starts) == 5, "what did not start is not started again"


def test_the_base_of_a_kill_is_measured_on_the_same_server(
    starts: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "COUNTED_S", 0.1)
    assert [row[:2] for row in rows(tmp_path, "tp2", "kill")] == [["start", "tp2"], ["kill", "tp2"]]
    assert len(starts) == 2, "a first one fills the caches"


def test_experts_move_where_ranks_have_them_whole(
    starts: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "COUNTED_S", 0.1)
    layouts = "tp2,ep2,dp2ep2"
    failed = "failed: no worker of this layout moves experts"
    assert rows(tmp_path, layouts, "balance") == [["balance", "ep2", failed], ["balance", "dp2ep2", failed]]
    flags, _ = starts
    assert flags[-2 - len(measures.BALANCE_FLAGS) : -2] == [*measures.BALANCE_FLAGS]
    families = ("expert_rank_load", "1.0"), ("expert_rank_load_worst", "1.25"), ("expert_load_worst", "9.0")
    lines = [f'blockyard:{name}{{worker="gpu_worker"}} {value}' for name, value in families]
    monkeypatch.setattr(SuiteServer, "_metrics", lambda self: lines)
    assert rows(tmp_path, layouts, "balance") == [["balance", "ep2", "1.25"], ["balance", "dp2ep2", "1.25"]]


def test_no_figure_is_begun_when_the_time_is_over(starts: list[Sequence[str]], tmp_path: Path) -> None:
    found = rows(tmp_path, "one,tp2", "itl-one", "all-reduce", limit_s=0.0)
    assert [row[0] for row in found] == ["all-reduce", "itl-one", "itl-one"] and not starts
    assert {row[2] for row in found} == {"not measured: --limit is over"}


def test_a_server_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    began_s = time.perf_counter()
    with (
        pytest.raises(BenchError, match="the server ended with -9 before it was ready"),
        served.serve(shapes.find("demo", tmp_path), ("--device", "cpu"), tmp_path / "log", most_s=0.5),
    ):
        pass
    assert time.perf_counter() - began_s < 20


def test_another_server_is_compared_with_two_ranks(
    starts: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[Sequence[str]]()

    @contextlib.contextmanager
    def run_server(command: Sequence[str], ready: str, log: Path, most_s: float) -> Iterator[SuiteServer]:
        commands.append([*command, ready])
        with run.serve(log, [], log, most_s) as found:
            yield found

    monkeypatch.setattr(run, "run_server", run_server)
    words = ("other", "--model", "{model}", "--port", "{port}")
    of_peer = BenchMachine(SIZES, ("--device", "cpu"), tmp_path, tmp_path, TimeLimits(100.0, 60.0), words)
    [plan] = plans_of("demo", ["itl-one"], ["tp2"], has_peer=True)
    two, peer, compared = ModelRun(of_peer, plan).rows()
    assert (compared.layout, compared.value, compared.base_value) == ("tp2", two.value, peer.value)
    assert commands == [["other", "--model", str(of_peer.find("demo")), "--port", "{port}", "/health"]]


def test_what_a_server_had_no_time_for_is_said(
    starts: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BenchError("a request failed")

    monkeypatch.setattr(SuiteServer, "stream", fail)
    assert rows(tmp_path, "one", "itl-one") == [["itl-one", "one", "failed: a request failed"]]
    monkeypatch.setattr(TimeLimits, "of_server_s", lambda self: 0.0)
    assert rows(tmp_path, "one", "itl-one") == [["itl-one", "one", "not measured: --each or --limit is over"]]


def test_layouts_of_more_gpus_than_there_are_get_a_line(
    starts: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "count_gpus", lambda environ: 2)
    of_gpus = machine(tmp_path)
    of_gpus.on_gpus = True
    [plan] = plans_of("demo", ["itl-one"], ["tp2", "tp4"])
    found = [row.problem for row in ModelRun(of_gpus, plan).rows()]
    assert found == ["", "not measured: it needs 4 GPUs, and there are 2"]
    [flags] = starts
    assert flags[3:5] == ["--cudagraph-capture-sizes", "1"]


def test_sums_are_measured_once_for_a_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measure(num_ranks: int, *others: object, **named: object) -> tuple[DeviceRates, list[SumTime]]:
        asked.append(num_ranks)
        return sums_of(num_ranks, SIZES.sums)

    monkeypatch.setattr(rank_sums, "measure", measure)
    found = rows(tmp_path, "one,tp2,pp2,tp4", "all-reduce")
    assert [row[1:] for row in found] == [[name, us] for name in ("tp2", "tp4") for us in ("100 us", "200 us")]
    assert asked == [2, 4]


def test_rows_that_are_computed_need_others(
    starts: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_sums, "measure", sums_of)
    found = rows(tmp_path, "one,tp2", "all-reduce", "itl-one", "floor-one", "itl-stage", "rate")
    shares = [row[2] for row in found if row[0] == "floor-one"]
    assert len(shares) == 2 and all(0 < float(share) < 1 for share in shares)
    assert ["itl-stage", "one"] in [row[:2] for row in found]
    [idle] = rows(tmp_path, "pp2", "idle")
    assert idle == ["idle", "pp2", "failed: it needs itl-stage of one"]
    monkeypatch.setattr(rank_sums, "measure", lambda num, sizes, *_, **__: sums_of(num, sizes))
    assert [row[0] for row in rows(tmp_path, "tp2", "itl-one", "floor-one")] == ["itl-one", "floor-one"]
    [alone] = rows(tmp_path, "tp2", "floor-one")
    assert alone == ["floor-one", "tp2", "failed: it needs itl-one of tp2"]


def test_two_ranks_add_their_parts() -> None:
    rates, [found] = rank_sums.measure(2, [16 << 10], 60.0, on_gpus=False)
    assert rates.read_bytes_per_s > 1e8
    assert (found.transport, found.num_bytes) == ("gloo", 16 << 10) and min(found.sum_s, found.with_norm_s) > 0


def test_ranks_that_fail_are_an_error() -> None:
    with pytest.raises(BenchError, match="the sums over 0 ranks could not be measured"):
        rank_sums.measure(0, [16 << 10], 60.0, on_gpus=False)


def test_a_wrong_word_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^itl: no such item"):
        main(["demo", "itl"])
    with pytest.raises(ConfigError, match=r"^--layouts xy2: expected tp2"):
        main(["demo", "--layouts", "xy2", "itl-one"])
    with pytest.raises(ConfigError, match=r"a folder with config\.json, or one of demo, "):
        main([str(tmp_path / "none")])
    with pytest.raises(ConfigError, match=r"^--stand-in demo: llama-3\.1-8b is not one of the tables two-gpus, four"):
        main(["llama-3.1-8b", "--stand-in", "demo"])


def test_a_folder_without_a_tokenizer_gets_one(tmp_path: Path) -> None:
    source, made = tmp_path / "source" / "model", tmp_path / "made"
    source.mkdir(parents=True)
    (source / "config.json").write_bytes((shapes.CONFIGS / "qwen3-0.6b.json").read_bytes())
    found = shapes.find(str(source), made)
    assert found == made / "model" and (found / "tokenizer.json").is_file()
