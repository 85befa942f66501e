"""`blockyard bench suite`: measures the items and prints their table."""

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

import blockyard
from blockyard.services.bench import report
from blockyard.services.bench.flags import Parser
from blockyard.services.bench.load.results import BenchError
from blockyard.services.bench.suite import adapters, measures, shapes
from blockyard.services.bench.suite.item import SuiteItem
from blockyard.services.bench.suite.items import ITEMS
from blockyard.services.bench.suite.measures import Measurement, SuiteContext
from blockyard.services.bench.suite.served import serve
from blockyard.shared.architectures import find_architecture
from blockyard.shared.errors import BlockyardError, ConfigError

T = TypeVar("T")
HEAD = "| item | what | measured | target | floor | p50 / p99 |\n|---|---|---|---|---|---|"


class SuiteRow(msgspec.Struct, frozen=True):
    """An item in the JSON."""

    name: str
    what: str
    unit: str
    model: str
    flags: tuple[str, ...]
    target: float
    floor: float | None
    measured: Measurement | None
    failure: str = ""
    skipped: str = ""  # why it was not measured
    base: float | None = None  # what the item's base measured; None: nothing, or it has none


class SuiteReport(msgspec.Struct, frozen=True, tag_field="kind", tag="suite"):
    version: str
    date: str
    lines: list[SuiteRow]


def main(args: Sequence[str]) -> int:
    """Returns 1 if an item could not be measured; a missed target is no error. Raises BlockyardError."""
    options = _parser().parse_args(list(args))
    if options.list:
        print("\n".join(f"{item.name:<16} {item.what}" for item in ITEMS))
        return 0
    items = choose(options.items)
    lines = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(items, Path(folder), tuple(options.worker_flags.split())):
            lines.append(line)
            print(row(line), flush=True)
    if options.output:
        report.write(options.output, report.as_json(SuiteReport(blockyard.__version__, report.date(), lines)))
    return 1 if any(line.failure for line in lines) else 0


def row(line: SuiteRow) -> str:
    """Returns an item's row of the table."""
    floor = "" if line.floor is None else f"{line.floor:,g}"
    if line.skipped:
        return f"| {line.name} | {line.what} | skipped: {line.skipped} | {line.target:,g} | {floor} | |"
    if line.measured is None:
        return f"| {line.name} | {line.what} | failed: {line.failure.splitlines()[0]} | {line.target:,g} | {floor} | |"
    item = next(item for item in ITEMS if item.name == line.name)
    compared = line.measured.value if line.base is None else line.measured.value / line.base
    verdict = "" if (item.base and line.base is None) or item.meets_target(compared) else " (missed)"
    spreads = ", ".join(f"{name} {one.p50:,.2f} / {one.p99:,.2f} ms" for name, one in line.measured.spreads.items())
    if line.measured.experts is not None:
        spreads += f"; {line.measured.experts:.2f} of the experts of even routing"
    spreads += "".join(f"; launches {share:.2f} of {kind}" for kind, share in line.measured.launch_shares.items())
    measured = f"{line.measured.value:,.4g}" if line.measured.value < 1000 else f"{line.measured.value:,.0f}"
    measured += "" if line.base is None else f" ({compared:.2f} of {item.base})"
    return (
        f"| {line.name} | {line.what} | {measured} {line.unit} of {len(line.measured.runs)} runs"
        f" | {line.target:,g}{verdict} | {floor} | {spreads} |"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="blockyard bench suite",
        description="Measures this machine's GPU with random weights of true shapes. Targets and floors are those of"
        " one NVIDIA H200. Output lengths are checked; the prefix cache is off unless an item measures it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("items", nargs="*", metavar="ITEM", help="what to measure: items, or all items of a model (all)")
    add("--list", action="store_true", help="list the items")
    add("--worker-flags", default="", help="more flags for each server and LLM, as one argument: '--flag value ...'")
    add("--output", metavar="FILE", help="write the full report as JSON")
    return parser


def choose(names: Sequence[str]) -> list[SuiteItem]:
    """Returns the items of these names or models and those that they are compared with, in the order of the table."""
    known, models = {item.name for item in ITEMS}, {item.model for item in ITEMS}
    unknown = [name for name in names if name not in known | models]
    if unknown:
        listed = f"the items are {', '.join(item.name for item in ITEMS)}"
        raise ConfigError(f"{unknown[0]}: no such item; {listed}; the models are {', '.join(sorted(models))}")
    chosen = {item.name: item for item in ITEMS if not names or item.name in names or item.model in names}
    bases = {item.base for item in chosen.values()}
    return [item for item in ITEMS if item.name in chosen or item.name in bases]


def measure(items: Sequence[SuiteItem], folder: Path, more: tuple[str, ...]) -> Iterator[SuiteRow]:
    bases, values = {item.name: item.base for item in items}, dict[str, float]()
    for line in _measured(items, folder, more):
        if line.measured is not None:
            values[line.name] = line.measured.value
        yield msgspec.structs.replace(line, base=values.get(bases[line.name]))


def _measured(items: Sequence[SuiteItem], folder: Path, more: tuple[str, ...]) -> Iterator[SuiteRow]:
    """Consecutive items with the same model, flags and adapters share a server."""
    for (model, flags, ranks), group in itertools.groupby(items, key=lambda one: (one.model, one.flags, one.adapters)):
        together = list(group)
        named = shapes.architectures(model)
        if find_architecture(named) is None:
            yield from (_row(item, None, skipped=f"no architecture {', '.join(named)} here") for item in together)
            continue
        adapted = adapters.serve_flags(model, ranks, folder)
        context = SuiteContext(shapes.write(model, folder), flags + more + adapted, folder)
        on_server = [item for item in together if item.measure_server is not None]
        yield from _on_one_server(on_server, context)
        context = msgspec.structs.replace(context, has_started=bool(on_server))
        for item in together:
            if item.measure_alone is not None:
                yield _line(item, item.measure_alone, context)


def _on_one_server(items: Sequence[SuiteItem], context: SuiteContext) -> Iterator[SuiteRow]:
    if not items:
        return
    with contextlib.ExitStack() as stack:
        log = context.logs / f"{items[0].name}.log"
        try:
            served = stack.enter_context(serve(context.model, context.flags, log)).complete()
        except BenchError as e:
            yield from (_failed(item, e) for item in items)
            return
        for item in items:
            assert item.measure_server is not None, "chosen so"
            even = "dummy-skewed" not in context.flags
            yield _line(item, measures.with_counters(item.measure_server, even), served)


def _line(item: SuiteItem, measure: Callable[[T], Measurement], subject: T) -> SuiteRow:
    """A failure becomes a row, so that the other items are still measured."""
    try:
        measured = measure(subject)
    except (BlockyardError, OSError) as e:
        return _failed(item, e)
    return _row(item, measured)


def _failed(item: SuiteItem, e: Exception) -> SuiteRow:
    print(f"blockyard bench suite: {item.name}: {e}", file=sys.stderr)
    return _row(item, None, str(e) or type(e).__name__)


def _row(item: SuiteItem, measured: Measurement | None, failure: str = "", skipped: str = "") -> SuiteRow:
    figures = (item.unit, item.model, item.flags, item.target, item.floor)
    return SuiteRow(item.name, item.what, *figures, measured, failure, skipped)
