"""`blockyard bench pd`: starts the servers one after another, measures them and prints the table."""

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

import blockyard
from blockyard.services.bench import report
from blockyard.services.bench.flags import Parser, count, positive
from blockyard.services.bench.prefill_decode.deployments import PDItem, needed, read_items
from blockyard.services.bench.prefill_decode.measures import PDFigures, PDSizes, measure
from blockyard.services.bench.prefill_decode.rows import HEAD, PDRow, rows_of
from blockyard.services.bench.prefill_decode.trial_log import TrialLog
from blockyard.services.bench.suite import shapes
from blockyard.services.bench.suite.served import serve
from blockyard.shared.errors import BlockyardError

MODEL = "llama-3.1-8b"
FLAGS = ("--no-enable-prefix-caching", "--max-model-len", "16384")
STEP_SIZES = (112, 160, 448)  # of two unified workers, for goodput


class PDReport(msgspec.Struct, frozen=True, tag_field="kind", tag="pd"):
    version: str
    date: str
    sizes: PDSizes
    figures: dict[str, PDFigures]
    rows: list[PDRow]


def main(args: Sequence[str]) -> int:
    """Returns 1 if a server could not be measured; a missed bar is no error. Raises BlockyardError."""
    options = _parser().parse_args(list(args))
    items = read_items(options.items)
    sizes = PDSizes(
        prompt=options.prompt_len,
        runs=options.runs,
        streams=options.streams,
        num_prompts=options.num_prompts,
        num_requests=options.num_requests,
        rates=tuple(sorted(options.rates)),
        itl_limit_ms=options.itl,
    )
    servers = needed(items, options.step_sizes, options.servers)
    log = TrialLog(options.trials, sizes.num_requests)
    figures: dict[str, PDFigures] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.write(options.model, Path(folder))
        for i, deployment in enumerate(servers):
            print(f"{deployment.name}: blockyard serve {' '.join(deployment.flags)}", file=sys.stderr, flush=True)
            flags = (*FLAGS, *deployment.flags, *options.worker_flags.split())
            try:
                with serve(model, flags, Path(folder) / f"{i}.log") as served:
                    on_trial = partial(log.add, deployment.name)
                    figures[deployment.name] = measure(served.complete(), deployment.items & items, sizes, on_trial)
            except (BlockyardError, OSError) as e:
                print(f"blockyard bench pd: {deployment.name}: {e}", file=sys.stderr)
                failed = True
    log.add_to(figures, sizes)
    rows = rows_of(figures, sizes)
    print(HEAD, *rows, sep="\n", flush=True)
    if options.output:
        made = PDReport(blockyard.__version__, report.date(), sizes, figures, rows)
        report.write(options.output, report.as_json(made))
    return 1 if failed else 0


def _parser() -> Parser:
    default = PDSizes()
    parser = Parser(
        prog="blockyard bench pd",
        description="Compares one prefill and one decode worker on two GPUs with one and with two unified workers."
        " Weights are random, with true shapes; the bars are those of two NVIDIA H200 of one host.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("items", nargs="*", metavar="ITEM", help=f"what to measure: {', '.join(PDItem)} (all)")
    add("--model", choices=sorted(shapes.SHAPES), default=MODEL, help="(%(default)s)")
    add("--prompt-len", type=count, default=default.prompt, help="tokens of the long prompts (%(default)s)")
    add("--runs", type=count, default=default.runs, help="prompts alone (%(default)s)")
    add("--streams", type=count, default=default.streams, help="streams beside the prompts (%(default)s)")
    add("--num-prompts", type=count, default=default.num_prompts, help="prompts beside the streams (%(default)s)")
    add("--num-requests", type=count, default=default.num_requests, help="requests of a goodput trial (%(default)s)")
    add("--rates", type=positive, nargs="+", default=default.rates, help="requests a second of trials %(default)s")
    add(
        "--step-sizes",
        type=count,
        nargs="+",
        default=STEP_SIZES,
        help="of two unified workers, for goodput %(default)s",
    )
    add(
        "--itl",
        type=positive,
        metavar="MS",
        help="one limit of the p99 ITL for goodput: no rate above it is tried (all)",
    )
    add(
        "--servers",
        nargs="*",
        help="start only these of the servers that the items need: one, apart, apart-unchecked, two, and two-N with N"
        " tokens a step; none named: only print the table of --trials (all)",
    )
    add("--trials", type=Path, metavar="FILE", help="add goodput trials to this file, and those in it to the table")
    add("--worker-flags", default="", help="more flags for each server, as one argument: '--flag value ...'")
    add("--output", metavar="FILE", help="write the full report as JSON")
    return parser
