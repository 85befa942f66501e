"""Starts the servers of a plan one after another and takes their figures."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from blockyard.services.bench.load.results import BenchError
from blockyard.services.bench.parallel import rank_sums
from blockyard.services.bench.parallel.items import (
    FLOOR,
    IDLE,
    ITEMS,
    KILL,
    PEER_ITEM,
    START,
    START_FLAGS,
    SUMS,
    ServerStart,
    described,
    graph_sizes,
    longest,
)
from blockyard.services.bench.parallel.layouts import ONE, PEER, Layout, has_gpu
from blockyard.services.bench.parallel.measures import ParallelSizes
from blockyard.services.bench.parallel.rows import (
    ParallelRow,
    best_rows,
    has_experts,
    idle_share,
    peer_row,
    read_floor_ms,
    row_of,
    sum_rows,
)
from blockyard.services.bench.parallel.tables import ModelPlan
from blockyard.services.bench.suite import shapes
from blockyard.services.bench.suite.served import SuiteServer, run_server, serve
from blockyard.services.launcher.executors import count_gpus
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import DeviceRates, SumTime

UNCACHED = ("--no-enable-prefix-caching",)
SUMS_LIMIT_S = 120.0
MOST_HOST_BYTES = 2 << 20  # of a sum over ranks on the CPU: larger ones take seconds


class TimeLimits:
    """The time that is left to a run, and the most that a server has of it."""

    def __init__(self, total_s: float, each_s: float) -> None:
        self._ends_s, self._each_s = time.perf_counter() + total_s, each_s

    def left_s(self) -> float:
        return max(self._ends_s - time.perf_counter(), 0.0)

    def of_server_s(self) -> float:
        return min(self.left_s(), self._each_s)


class BenchMachine:
    """Runs servers and sums over ranks on this machine, within the limits of time."""

    def __init__(
        self,
        sizes: ParallelSizes,
        flags: tuple[str, ...],
        models: Path,
        logs: Path,
        limits: TimeLimits,
        peer: Sequence[str] = (),
    ) -> None:
        """flags: of all servers. models, logs: folders for what is written. peer: the command of PEER."""
        self.sizes, self.on_gpus = sizes, has_gpu() and "cpu" not in flags
        self.device: DeviceRates | None = None  # None: not measured
        self._flags, self._models, self._logs, self._limits, self._peer = flags, models, logs, limits, peer

    def find(self, model: str) -> Path:
        """Raises ConfigError if there is no such model."""
        return shapes.find(model, self._models)

    def refusal(self, layout: Layout) -> str:
        """Returns why nothing of a layout can be begun; empty: it can."""
        num_gpus = count_gpus(os.environ) if self.on_gpus else math.inf
        if layout.num_gpus > num_gpus:
            return f"it needs {layout.num_gpus} GPUs, and there are {num_gpus}"
        return "" if self._limits.left_s() else "--limit is over"

    def of_server_s(self) -> float:
        """Returns the seconds that a server has at most."""
        return self._limits.of_server_s()

    def rates(self, num_ranks: int) -> DeviceRates:
        """Measures the rate at which the device reads its memory, if no sums have. Raises BenchError."""
        if self.device is None:
            self.sums(num_ranks, [])
        assert self.device is not None
        return self.device

    def sums(self, num_ranks: int, sizes: Sequence[int]) -> list[SumTime]:
        """Times sums over ranks, and the rate at which the device reads its memory. Raises BenchError."""
        sizes = [size for size in sizes if self.on_gpus or size <= MOST_HOST_BYTES]
        limit_s = min(SUMS_LIMIT_S, self._limits.left_s())
        self.device, times = rank_sums.measure(num_ranks, sizes, limit_s, on_gpus=self.on_gpus)
        return times

    def serve(
        self, folder: Path, layout: Layout, start: ServerStart, names: Sequence[str], max_model_len: int
    ) -> contextlib.AbstractContextManager[SuiteServer]:
        """names: items of the layout. Raises BenchError if it does not get ready."""
        log = self._logs / f"{folder.name}-{layout.name}-{start.value}.log"
        if layout is PEER:
            words = [str(folder) if word == "{model}" else word for word in self._peer]
            print(f"{folder.name}, {layout.name}: {' '.join(words)}", file=sys.stderr, flush=True)
            return run_server(words, "/health", log, self.of_server_s())
        flags = [*UNCACHED, "--max-model-len", str(max_model_len)]
        if self.on_gpus:
            flags += ["--cudagraph-capture-sizes", ",".join(map(str, graph_sizes(names, layout, self.sizes)))]
        flags += [*layout.flags, *START_FLAGS.get(start, ()), *self._flags]
        print(f"{folder.name}, {layout.name}, {start.value} server: {' '.join(flags)}", file=sys.stderr, flush=True)
        return serve(folder, flags, log, self.of_server_s())


class ModelRun:
    """Measures layout by layout. A figure that fails is a row, and the others are still measured."""

    def __init__(self, machine: BenchMachine, plan: ModelPlan) -> None:
        """Raises ConfigError if there is no such model."""
        self._machine, self._plan = machine, plan
        self._folder = machine.find(plan.model)
        self._name = self._folder.name
        self._config = text_part(msgspec.json.decode((self._folder / "config.json").read_bytes()))
        self._values: dict[tuple[str, str], float] = {}  # by layout and item
        self._not_started: dict[str, Exception] = {}  # by layout

    def rows(self) -> Iterator[ParallelRow]:
        made = list[ParallelRow]()
        for row in self._rows():
            made.append(row)
            yield row
        if has_experts(self._config):
            yield from (self._with_bar(row) for row in best_rows(made, self._plan.layouts))

    def _rows(self) -> Iterator[ParallelRow]:
        summed = {layout.num_gpus: layout for layout, names in reversed(self._plan.items) if SUMS in names}
        for num_ranks, layout in reversed(summed.items()):
            yield from self._sums(num_ranks, layout)
        for layout, names in self._plan.items:
            for start in ServerStart:
                here = [name for name in names if ITEMS[name].measure is not None and ITEMS[name].start is start]
                if KILL in here and START not in here:  # its base
                    here.insert(0, START)
                yield from self._server(layout, start, here, names)
                if start is ServerStart.FIRST:
                    yield from (self._computed(name, layout) for name in names if name in (FLOOR, IDLE))
            what = described(PEER_ITEM, self._machine.sizes)
            if layout is PEER and (row := peer_row(what, self._values, self._name)) is not None:
                yield self._with_bar(row)

    def _sums(self, num_ranks: int, layout: Layout) -> Iterator[ParallelRow]:
        if refusal := self._machine.refusal(layout):
            yield self._without_value(SUMS, layout, f"not measured: {refusal}")
            return
        try:
            times = self._machine.sums(num_ranks, self._machine.sizes.sums)
        except BlockyardError as e:
            yield self._failed(SUMS, layout, e)
            return
        yield from sum_rows(layout.name, num_ranks if self._machine.on_gpus else 0, times, self._name)

    def _server(
        self, layout: Layout, start: ServerStart, here: Sequence[str], names: Sequence[str]
    ) -> Iterator[ParallelRow]:
        """Rows of one server. here: those that it is started for. names: all of the layout."""
        if not here:
            return
        refusal, left = self._machine.refusal(layout), list(here)
        ends_s = time.perf_counter() + self._machine.of_server_s()
        if layout.name in self._not_started:
            yield from (self._failed(name, layout, self._not_started[layout.name]) for name in left)
            return
        try:
            if not refusal and start is ServerStart.SECOND and not _has_first(names):
                with self._serve(layout, ServerStart.FIRST, names):
                    pass
            if not refusal:
                with self._serve(layout, start, names) as served:
                    if start is ServerStart.FIRST and layout is not PEER:
                        served.complete()
                    while left and not (refusal := self._machine.refusal(layout)):
                        yield self._measured(left[0], layout, served, ends_s)
                        left.pop(0)
        except (BlockyardError, OSError) as e:
            self._not_started[layout.name] = e
            yield from (self._failed(name, layout, e, ends_s) for name in left)
            return
        yield from (self._without_value(name, layout, f"not measured: {refusal}") for name in left)

    def _serve(
        self, layout: Layout, start: ServerStart, names: Sequence[str]
    ) -> contextlib.AbstractContextManager[SuiteServer]:
        most = longest(self._plan.names, self._machine.sizes)
        return self._machine.serve(self._folder, layout, start, names, most)

    def _measured(self, name: str, layout: Layout, served: SuiteServer, ends_s: float) -> ParallelRow:
        """ends_s: when the server is killed."""
        measure = ITEMS[name].measure
        assert measure is not None
        try:
            self._values[layout.name, name] = measure(served, self._machine.sizes)
        except (BlockyardError, OSError) as e:
            return self._failed(name, layout, e, ends_s)
        return self._row(name, layout)

    def _computed(self, name: str, layout: Layout) -> ParallelRow:
        """A row of an item that is computed from others."""
        try:
            if name == IDLE:
                stage, rate = self._values[ONE.name, "itl-stage"], self._values[layout.name, "rate"]
                self._values[layout.name, name] = idle_share(stage, rate, self._machine.sizes.many)
            else:
                itl = self._values[layout.name, "itl-one"]
                floor = self._floor_ms(layout, self._machine.rates(layout.num_gpus))
                if floor is None:
                    raise BenchError("the weights that a token reads are not known: the model has experts")
                self._values[layout.name, name] = floor / itl
        except KeyError as e:
            return self._failed(name, layout, BenchError("it needs {1} of {0}".format(*e.args[0])))
        except BlockyardError as e:
            return self._failed(name, layout, e)
        return self._row(name, layout)

    def _row(self, name: str, layout: Layout) -> ParallelRow:
        what, is_mixture = described(name, self._machine.sizes), has_experts(self._config)
        row = row_of(name, layout.name, what, self._values, self._name, of_mixture=is_mixture)
        device = self._machine.device if name == "itl-one" and self._machine.on_gpus else None
        floor = None if device is None else self._floor_ms(layout, device)
        return self._with_bar(msgspec.structs.replace(row, floor=floor))

    def _with_bar(self, row: ParallelRow) -> ParallelRow:
        """Bars are those of GPUs."""
        return row if self._machine.on_gpus else msgspec.structs.replace(row, bar=None)

    def _floor_ms(self, layout: Layout, device: DeviceRates) -> float | None:
        return read_floor_ms(self._config, layout.num_gpus, device.read_bytes_per_s)

    def _failed(self, name: str, layout: Layout, e: Exception, ends_s: float = math.inf) -> ParallelRow:
        print(f"blockyard bench parallel: {self._name}, {name} of {layout.name}: {e}", file=sys.stderr, flush=True)
        if time.perf_counter() > ends_s:
            return self._without_value(name, layout, "not measured: --each or --limit is over")
        return self._without_value(name, layout, f"failed: {str(e) or type(e).__name__}")

    def _without_value(self, name: str, layout: Layout, problem: str) -> ParallelRow:
        what = described(name, self._machine.sizes)
        return ParallelRow(self._name, name, layout.name, what, problem=problem)


def _has_first(names: Sequence[str]) -> bool:
    return any(ITEMS[name].measure is not None and ITEMS[name].start is ServerStart.FIRST for name in names)
