"""`blockyard bench parallel`: measures one GPU and layouts of several, and prints their table."""

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

import blockyard
from blockyard.services.bench import report
from blockyard.services.bench.flags import Parser, count, positive
from blockyard.services.bench.parallel.items import ITEMS, PEER_ITEM
from blockyard.services.bench.parallel.layouts import PEER_OF
from blockyard.services.bench.parallel.measures import ParallelSizes
from blockyard.services.bench.parallel.rows import HEAD, ParallelRow
from blockyard.services.bench.parallel.run import BenchMachine, ModelRun, TimeLimits
from blockyard.services.bench.parallel.tables import LAYOUTS, TABLES, plans_of
from blockyard.shared.messages import DeviceRates


class ParallelReport(msgspec.Struct, frozen=True, tag_field="kind", tag="parallel"):
    version: str
    date: str
    device: DeviceRates | None
    sizes: ParallelSizes
    rows: list[ParallelRow]


def main(args: Sequence[str]) -> int:
    """Returns 1 if a figure could not be measured; a missed bar is no error. Raises BlockyardError."""
    options = _parser().parse_intermixed_args(list(args))
    layouts = [name for name in options.layouts.split(",") if name]
    peer = shlex.split(options.peer)
    models = [name for name in options.models.split(",") if name]
    plans = plans_of(options.model, options.items, layouts, options.stand_in, models=models, has_peer=bool(peer))
    default = ParallelSizes()
    sizes = ParallelSizes(
        runs=options.runs,
        streams=options.streams,
        many=options.many,
        streams_len=(options.context - default.streams_len[1] // 2, default.streams_len[1]),
        many_len=(options.context - default.many_len[1] // 2, default.many_len[1]),
        prompt=options.prompt_len,
        long_prompt=options.long_prompt_len,
        requests=options.requests,
        requests_len=(options.request_len, options.request_len),
    )
    made = list[ParallelRow]()
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        limits = TimeLimits(options.limit, options.each)
        machine = BenchMachine(sizes, tuple(options.worker_flags.split()), Path(folder), logs, limits, peer)
        runs = [ModelRun(machine, plan) for plan in plans]
        print(HEAD, flush=True)
        for row in (row for run in runs for row in run.rows()):
            print(row, flush=True)
            made.append(row)
            if options.output:  # as measured: a machine may be taken away
                done = ParallelReport(blockyard.__version__, report.date(), machine.device, sizes, made)
                report.write(options.output, report.as_json(done))
    if machine.device is not None:
        print(f"\n{machine.device.name}, read {machine.device.read_bytes_per_s / 1e12:.3g} TB/s, {report.date()}")
    return 1 if any(row.problem for row in made) else 0


def _parser() -> Parser:
    default = ParallelSizes()
    parser = Parser(
        prog="blockyard bench parallel",
        description="Measures one GPU and layouts of several, one after another, with random weights, and prints each"
        " figure with its ratio to one GPU, floor and bar. Without a GPU all run on the CPU.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a folder with config.json, demo, or a shape of bench suite, as llama-3.1-8b;"
        f" or the figures of several models: {', '.join(TABLES)}",
    )
    usual = [name for name, item in ITEMS.items() if item.is_usual]
    named = [name for name in ITEMS if name not in usual]
    add("items", nargs="*", metavar="ITEM", help=f"what to measure: {', '.join(usual)} (all), {', '.join(named)}")
    add(
        "--layouts",
        default="",
        help="one, tp2, pp2, dp2, ep2 and products, as dp2ep2; apart-tp2: a prefill and a decode worker of tp2"
        f" ({','.join(LAYOUTS)}, or those of the tables)",
    )
    add("--models", default="", help="of tables: only these (all)")
    add("--stand-in", metavar="MODEL", default="", help="of tables: this model in place of all others, to try them")
    add("--limit", type=positive, default=float("inf"), help="seconds after which nothing is measured (%(default)s)")
    add("--each", type=positive, default=float("inf"), help="seconds that a server has at most (%(default)s)")
    add("--runs", type=count, default=default.runs, help="of each load (%(default)s)")
    add("--streams", type=count, default=default.streams, help="itl-some: streams (%(default)s)")
    add("--many", type=count, default=default.many, help="rate, idle: streams (%(default)s)")
    add("--context", type=count, default=1024, help="itl-some, rate, idle: tokens, about (%(default)s)")
    add("--prompt-len", type=count, default=default.prompt, help="ttft, beside, handover: tokens (%(default)s)")
    add("--long-prompt-len", type=count, default=default.long_prompt, help="ttft-long: tokens (%(default)s)")
    add("--requests", type=count, default=default.requests, help="offline: requests (%(default)s)")
    add("--request-len", type=count, default=1000, help="offline: tokens in, and out (%(default)s)")
    add("--worker-flags", default="", help="more flags for each server, as one argument: '--flag value ...'")
    add(
        "--peer",
        metavar="COMMAND",
        default="",
        help=f"another server on two GPUs, whose {PEER_ITEM} that of {PEER_OF} is compared with: a command with the"
        " words {model} and {port}; it serves once /health answers",
    )
    add("--logs", type=Path, metavar="FOLDER", help="keep the logs of servers there")
    add("--output", metavar="FILE", help="write the report as JSON, after each row")
    return parser
