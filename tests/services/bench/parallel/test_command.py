"""The order of rows, and what happens to the others if one fails; on servers with mock workers."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rig import serve as rig_serve

from blockyard.services.bench.load.results import BenchError
from blockyard.services.bench.parallel import command, measures, rank_sums
from blockyard.services.bench.parallel.command import ParallelRun, main, read_items
from blockyard.services.bench.parallel.layouts import read_layout
from blockyard.services.bench.parallel.measures import ParallelSizes
from blockyard.services.bench.suite import shapes
from blockyard.services.bench.suite.served import SuiteServer
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import DeviceRates, SumTime

SIZES = ParallelSizes(runs=1, stream=(8, 30), sums=(16 << 10,), prompt=32)
BALANCED = ParallelSizes(streams=2, streams_len=(8, 4))
LAYOUTS = [read_layout("tp2"), read_layout("pp2")]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sequence[str]]]:
    """The flags of all starts. Pipelines do not start."""
    started: list[Sequence[str]] = []
    with rig_serve("demo", "--worker-cls", "mock", "--mock-step-ms", "2") as running:

        @contextlib.contextmanager
        def serve(model: Path, flags: Sequence[str], log: Path) -> Iterator[SuiteServer]:
            started.append(flags)
            if "--pipeline-parallel-size" in flags:
                raise BenchError("the server ended\nand said\nwith a long log\n")
            yield SuiteServer(running.url, running.launched_s)

        monkeypatch.setattr(command, "serve", serve)
        yield started


def rows(tmp_path: Path, *items: str, limit_s: float = 100.0) -> list[str]:
    run = ParallelRun(shapes.find("demo", tmp_path), read_items(items), SIZES, ("--device", "cpu"), tmp_path, limit_s)
    return [str(row) for row in run.rows(LAYOUTS)]


def test_a_layout_that_does_not_start_is_a_row_for_each_of_its_figures(
    starts: list[Sequence[str]], tmp_path: Path
) -> None:
    found = [row.split(" | ")[:3] for row in rows(tmp_path, "start", "kv-blocks", "ttft")]
    assert [(row[0][2:].split(":")[0], row[1]) for row in found] == [
        (item, layout) for layout in ("one", "tp2", "pp2") for item in ("ttft", "kv-blocks", "start")
    ]
    assert {row[2] for row in found[6:]} == {"failed: the server ended with a long log"}
    assert all(row[2].endswith((" ms", " blocks", " s")) for row in found[:6])
    assert [flags[-2:] for flags in starts[2:4]] == [("--tensor-parallel-size", "2")] * 2


def test_experts_move_where_ranks_have_them_whole(
    starts: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "COUNTED_S", 0.1)
    layouts, flags = [read_layout(name) for name in ("tp2", "ep2", "dp2ep2")], ("--device", "cpu")
    run = ParallelRun(shapes.find("demo", tmp_path), read_items(["balance"]), BALANCED, flags, tmp_path, 100.0)
    assert [row.problem for row in run.rows(layouts)] == ["failed: no worker of this layout moves experts"]
    assert [one[-len(measures.BALANCE_FLAGS) :] for one in starts] == [measures.BALANCE_FLAGS]
    families = ("expert_rank_load", "1.0"), ("expert_rank_load_worst", "1.25"), ("expert_load_worst", "9.0")
    lines = [f'blockyard:{name}{{worker="gpu_worker"}} {value}' for name, value in families]
    monkeypatch.setattr(SuiteServer, "_metrics", lambda self: lines)
    [row] = run.rows(layouts)
    assert (row.layout, row.value) == ("ep2", 1.25)


def test_no_figure_is_begun_when_the_time_is_over(starts: list[Sequence[str]], tmp_path: Path) -> None:
    found = rows(tmp_path, "itl-one", limit_s=0.0)
    assert len(found) == 3 and not starts
    assert all("not measured: --limit is over" in row for row in found)


def test_sums_are_measured_once_for_a_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measure(num_ranks: int, sizes: Sequence[int], *_: object, **__: object) -> tuple[DeviceRates, list[SumTime]]:
        asked.append(num_ranks)
        return DeviceRates("CPU", 4e10), [SumTime("gloo", size, 1e-4, 2e-4) for size in sizes]

    monkeypatch.setattr(rank_sums, "measure", measure)
    assert [row.split(" | ")[2] for row in rows(tmp_path, "all-reduce")] == ["100 us", "200 us"]
    assert asked == [2]


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


def test_a_folder_without_a_tokenizer_gets_one(tmp_path: Path) -> None:
    source, made = tmp_path / "source" / "model", tmp_path / "made"
    source.mkdir(parents=True)
    (source / "config.json").write_bytes((shapes.CONFIGS / "qwen3-0.6b.json").read_bytes())
    found = shapes.find(str(source), made)
    assert found == made / "model" and (found / "tokenizer.json").is_file()
