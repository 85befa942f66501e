"""`blockyard bench parallel`: measures one GPU and layouts of several, and prints their table."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import blockyard
from blockyard.services.bench import report
from blockyard.services.bench.flags import Parser, count, positive
from blockyard.services.bench.parallel import measures, rank_sums
from blockyard.services.bench.parallel.layouts import ONE, Layout, has_gpu, read_layout
from blockyard.services.bench.parallel.measures import ParallelSizes, ServerFigures
from blockyard.services.bench.parallel.rows import (
    BALANCE,
    HEAD,
    ITEMS,
    KILL,
    START,
    SUMS,
    ParallelRow,
    failed,
    has_experts,
    read_floor_ms,
    row_of,
    sum_rows,
)
from blockyard.services.bench.suite import shapes
from blockyard.services.bench.suite.served import SuiteServer, serve
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import BlockyardError, ConfigError
from blockyard.shared.messages import DeviceRates

LAYOUTS = ("tp2", "pp2", "ep2", "dp2ep2")
UNCACHED = ("--no-enable-prefix-caching",)
SUMS_LIMIT_S = 120.0
MOST_HOST_BYTES = 2 << 20  # of a sum over ranks on the CPU: larger ones take seconds
ROOM = 64  # tokens of a sequence beside its prompt and its output


class ParallelReport(msgspec.Struct, frozen=True, tag_field="kind", tag="parallel"):
    version: str
    date: str
    model: str
    device: DeviceRates | None
    sizes: ParallelSizes
    rows: list[ParallelRow]


def main(args: Sequence[str]) -> int:
    """Returns 1 if a figure could not be measured; a missed bar is no error. Raises BlockyardError."""
    options = _parser().parse_intermixed_args(list(args))
    layouts = [read_layout(name) for name in options.layouts.split(",") if name not in ("", ONE.name)]
    items = read_items(options.items)
    default = ParallelSizes()
    sizes = ParallelSizes(
        runs=options.runs,
        streams=options.streams,
        many=options.many,
        streams_len=(options.context - default.streams_len[1] // 2, default.streams_len[1]),
        many_len=(options.context - default.many_len[1] // 2, default.many_len[1]),
        prompt=options.prompt_len,
        long_prompt=options.long_prompt_len,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.find(options.model, Path(folder))
        run = ParallelRun(model, items, sizes, tuple(options.worker_flags.split()), Path(folder), options.limit)
        print(HEAD, flush=True)
        for row in run.rows(layouts):
            print(row, flush=True)
    if options.output:
        done = (blockyard.__version__, report.date(), str(options.model), run.device, sizes, run.made)
        report.write(options.output, report.as_json(ParallelReport(*done)))
    return 1 if any(row.problem for row in run.made) else 0


def read_items(names: Sequence[str]) -> list[str]:
    """All items for no names. Raises ConfigError for an unknown one."""
    if unknown := [name for name in names if name not in ITEMS]:
        raise ConfigError(f"{unknown[0]}: no such item; the items are {', '.join(ITEMS)}")
    return [name for name in ITEMS if not names or name in names]


class ParallelRun:
    """Measures layout by layout. A figure that fails is a row, and the others are still measured."""

    def __init__(
        self,
        model: Path,
        items: Sequence[str],
        sizes: ParallelSizes,
        flags: tuple[str, ...],
        folder: Path,
        limit_s: float,
    ) -> None:
        """flags: of all servers. folder: for their logs. limit_s: no figure is begun later."""
        self.device: DeviceRates | None = None  # None: not measured
        self.made: list[ParallelRow] = []
        self._model, self._items, self._sizes, self._folder = model, items, sizes, folder
        self._config: dict[str, Any] = text_part(msgspec.json.decode((model / "config.json").read_bytes()))
        self._flags = (*UNCACHED, "--max-model-len", str(self._longest()), *flags)
        self._on_gpus = has_gpu() and "cpu" not in flags
        self._limit_s, self._began_s = limit_s, time.perf_counter()
        self._values: dict[tuple[str, str], float] = {}

    def rows(self, layouts: Sequence[Layout]) -> Iterator[ParallelRow]:
        for row in self._rows(layouts):
            self.made.append(row)
            yield row

    def _rows(self, layouts: Sequence[Layout]) -> Iterator[ParallelRow]:
        if SUMS in self._items:
            for num_ranks, layout in {one.num_gpus: one for one in reversed(layouts)}.items():
                yield from self._sums(num_ranks, layout)
        for layout in (ONE, *layouts):
            on_server = [name for name in self._items if ITEMS[name].measure and (ITEMS[name].of_one or layout != ONE)]
            starts = [name for name in self._items if name in (START, KILL) and (ITEMS[name].of_one or layout != ONE)]
            yield from self._on_server(layout, on_server)
            yield from self._starts(layout, starts, has_started=bool(on_server))
            if BALANCE in self._items and layout.moves_experts:
                yield from self._balance(layout)

    def _longest(self) -> int:
        """Returns the length of the longest sequence of the chosen items."""
        sizes = self._sizes
        lengths = {
            "itl-one": sum(sizes.stream),
            "itl-some": sum(sizes.streams_len),
            BALANCE: sizes.streams_len[0] + measures.BALANCE_OUTPUT,
            "rate": sum(sizes.many_len),
            "idle": sum(sizes.many_len),
            "ttft": sizes.prompt,
            "ttft-long": sizes.long_prompt,
            KILL: 32 + sizes.killed_output,
        }
        return ROOM + max((lengths.get(name, 0) for name in self._items), default=0)

    def _sums(self, num_ranks: int, layout: Layout) -> Iterator[ParallelRow]:
        if num_ranks < 2:
            return
        try:
            sizes = [size for size in self._sizes.sums if self._on_gpus or size <= MOST_HOST_BYTES]
            self.device, times = rank_sums.measure(num_ranks, sizes, SUMS_LIMIT_S, on_gpus=self._on_gpus)
        except BlockyardError as e:
            yield self._problem(SUMS, layout, e)
            return
        rate = f"{self.device.name}, read {self.device.read_bytes_per_s / 1e12:.3g} TB/s"
        print(f"{num_ranks} ranks: {rate}", file=sys.stderr, flush=True)
        yield from sum_rows(layout.name, times, has_bars=self._on_gpus and num_ranks == 2)

    def _on_server(self, layout: Layout, items: Sequence[str]) -> Iterator[ParallelRow]:
        if not items or (yield from self._too_late(layout, items)):
            return
        with contextlib.ExitStack() as stack:
            try:
                served = stack.enter_context(self._serve(layout, "first")).complete()
            except (BlockyardError, OSError) as e:
                yield from (self._problem(name, layout, e) for name in items)
                return
            figures = ServerFigures(served, layout, self._sizes)
            for name in items:
                measure = ITEMS[name].measure
                assert measure is not None
                if not (yield from self._too_late(layout, [name])):
                    yield self._measured(name, layout, partial(measure, figures))

    def _starts(self, layout: Layout, items: Sequence[str], *, has_started: bool) -> Iterator[ParallelRow]:
        """Figures of a second start: caches that outlive a start are filled."""
        if not items or (yield from self._too_late(layout, items)):
            return
        try:
            if not has_started:
                with self._serve(layout, "first"):
                    pass
            with self._serve(layout, "second") as served:
                start = self._measured(START, layout, lambda: measures.first_token_s(served))
                if START in items:
                    yield start
                if KILL in items:
                    yield self._measured(KILL, layout, lambda: measures.killed_rank_s(served, self._sizes))
        except (BlockyardError, OSError) as e:
            yield from (self._problem(name, layout, e) for name in items)

    def _balance(self, layout: Layout) -> Iterator[ParallelRow]:
        """The figure of a server of its own, whose router prefers some experts."""
        if (yield from self._too_late(layout, [BALANCE])):
            return
        try:
            with self._serve(layout, "skewed", measures.BALANCE_FLAGS) as served:
                yield self._measured(BALANCE, layout, lambda: measures.fullest_to_mean(served, self._sizes))
        except (BlockyardError, OSError) as e:
            yield self._problem(BALANCE, layout, e)

    def _serve(
        self, layout: Layout, start: str, more: Sequence[str] = ()
    ) -> contextlib.AbstractContextManager[SuiteServer]:
        return serve(self._model, (*self._flags, *layout.flags, *more), self._folder / f"{layout.name}-{start}.log")

    def _measured(self, item: str, layout: Layout, measure: Callable[[], float]) -> ParallelRow:
        try:
            self._values[layout.name, item] = measure()
        except (BlockyardError, OSError) as e:
            return self._problem(item, layout, e)
        row = row_of(item, layout.name, self._what(item), self._values, of_mixture=has_experts(self._config))
        if not self._on_gpus:
            return msgspec.structs.replace(row, bar=None)
        if item != "itl-one" or self.device is None:
            return row
        floor = read_floor_ms(self._config, layout.num_gpus, self.device.read_bytes_per_s)
        return msgspec.structs.replace(row, floor=floor)

    def _too_late(self, layout: Layout, items: Iterable[str]) -> Generator[ParallelRow, None, bool]:
        """Returns whether the time is over, and then gives a row for each item."""
        if time.perf_counter() - self._began_s < self._limit_s:
            return False
        yield from (failed(name, layout.name, self._what(name), "not measured: --limit is over") for name in items)
        return True

    def _problem(self, item: str, layout: Layout, e: Exception) -> ParallelRow:
        print(f"blockyard bench parallel: {item} of {layout.name}: {e}", file=sys.stderr, flush=True)
        return failed(item, layout.name, self._what(item), f"failed: {str(e) or type(e).__name__}")

    def _what(self, item: str) -> str:
        sizes, context = self._sizes, self._sizes.many_len[0] + self._sizes.many_len[1] // 2
        return ITEMS[item].what.format(
            streams=sizes.streams, many=sizes.many, context=context, prompt=sizes.prompt, long=sizes.long_prompt
        )


def _parser() -> Parser:
    default = ParallelSizes()
    parser = Parser(
        prog="blockyard bench parallel",
        description="Measures one GPU and layouts of several, one after another, with random weights, and prints each"
        " figure with its ratio to one GPU, floor and bar. Without a GPU all run on the CPU.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder with config.json, demo, or a shape of bench suite, as llama-3.1-8b")
    add("items", nargs="*", metavar="ITEM", help=f"what to measure: {', '.join(ITEMS)} (all)")
    add("--layouts", default=",".join(LAYOUTS), help="tp2, pp2, dp2, ep2 and products, as dp2ep2 (%(default)s)")
    add("--limit", type=positive, default=float("inf"), help="seconds after which no figure is begun (%(default)s)")
    add("--runs", type=count, default=default.runs, help="of each load (%(default)s)")
    add("--streams", type=count, default=default.streams, help="itl-some: streams (%(default)s)")
    add("--many", type=count, default=default.many, help="rate, idle: streams (%(default)s)")
    add("--context", type=count, default=1024, help="itl-some, rate, idle: tokens, about (%(default)s)")
    add("--prompt-len", type=count, default=default.prompt, help="ttft: tokens (%(default)s)")
    add("--long-prompt-len", type=count, default=default.long_prompt, help="ttft-long: tokens (%(default)s)")
    add("--worker-flags", default="", help="more flags for each server, as one argument: '--flag value ...'")
    add("--output", metavar="FILE", help="write the report as JSON")
    return parser
