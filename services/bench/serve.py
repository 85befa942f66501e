"""`blockyard bench serve`."""

import argparse
import asyncio
import datetime
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import uvloop

import blockyard
from blockyard.services.bench import arrivals, datasets, flags, metrics, plots, report, server, workload
from blockyard.services.bench.datasets import PromptMaker, SampleRequest
from blockyard.services.bench.load import client, monitor, processes
from blockyard.services.bench.load.client import Endpoint, LoadPlan, LoadRun
from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.server import BenchError, OpenAIServer
from blockyard.shared.errors import ConfigError
from blockyard.shared.spread import spread

WARM_UP_OUTPUT = 16  # tokens


def main(args: Sequence[str]) -> int:
    """Raises BlockyardError. 1 if nothing was completed, or not at the length --ignore-eos asked for."""
    given = flags.serve_parser().parse_args(list(args))
    workload.check(given)
    limits = metrics.read_limits(given.goodput)
    extra = read_extra(given.extra_body)
    found = server.find(given.base_url, given.api_key)
    model = given.model or found.first_model()
    draw = _draw(given, found, model)
    count = _counter(found, model) if given.dataset_path else datasets.estimate_tokens
    asked = workload.asks(given, draw, count)
    target = found.target(given.endpoint)

    def encode(ask: SampleRequest) -> bytes:
        return target.request(body(given, model, ask) | extra)

    _warm_up(given, target, draw, asked[0], encode)
    rng = random.Random(given.seed + 1)  # other numbers than the prompts'
    due_s = arrivals.due_times(len(asked), given.request_rate, given.burstiness, rng)
    plan = LoadPlan([encode(ask) for ask in asked], due_s, given.max_concurrency, given.timeout)
    outcomes, load, watched = _run(target, plan, [ask.num_output for ask in asked], given.client_processes)
    done = _report(given, model, found, load, watched, outcomes, limits)
    print(report.text(done))
    if given.output:
        report.write(Path(given.output), report.as_json(done))
    if given.html:
        report.write(Path(given.html), plots.page(done, outcomes, load.started_s).encode())
    short = given.ignore_eos and done.summary.requests_off_length > 0
    return 1 if short or not done.summary.completed else 0


def body(given: argparse.Namespace, model: str, ask: SampleRequest) -> dict[str, object]:
    """The request's JSON."""
    fields: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": given.temperature,
    }
    if given.endpoint == "chat":
        fields |= {"messages": [{"role": "user", "content": ask.prompt}], "max_completion_tokens": ask.num_output}
    else:
        fields |= {"prompt": ask.prompt, "max_tokens": ask.num_output}
    if given.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def read_extra(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as e:
        raise ConfigError(f"--extra-body {text}: not a JSON object: {e}") from e


def _draw(given: argparse.Namespace, found: OpenAIServer, model: str) -> PromptMaker:
    if given.endpoint == "completions":
        return datasets.RandomIds(*flags.vocab_range(given.vocab_range))
    try:
        num = found.num_tokens(model, " ".join(datasets.WORDS))
    except BenchError:
        return datasets.RandomWords()
    return datasets.RandomWords(max(num, 1) / len(datasets.WORDS))


def _counter(found: OpenAIServer, model: str) -> Callable[[str], int]:
    """The server's own count, or an estimate if it has no /tokenize."""
    try:
        found.num_tokens(model, "a")
    except BenchError as e:
        print(f"lengths are estimated at {datasets.CHARS_PER_TOKEN:g} characters a token: {e}", file=sys.stderr)
        return datasets.estimate_tokens
    return lambda text: found.num_tokens(model, text)


def _warm_up(
    given: argparse.Namespace,
    target: Endpoint,
    draw: PromptMaker,
    like: SampleRequest,
    encode: Callable[[SampleRequest], bytes],
) -> None:
    """Prompts of their own, so that no prefix of the run is cached. Raises BenchError if one fails."""
    rng = random.Random(given.seed - 1)
    num_output = min(like.num_output, WARM_UP_OUTPUT)
    asked = [SampleRequest(draw(rng, like.num_input), like.num_input, num_output) for _ in range(given.warmups)]
    plan = LoadPlan([encode(ask) for ask in asked], [0.0] * len(asked), 1, given.timeout)
    outcomes, _, _ = _run(target, plan, [num_output] * len(asked), 1, shown=False)
    for one in outcomes:
        if one.failure:
            raise BenchError(f"the first request failed: {one.failure}")


def _run(
    target: Endpoint, plan: LoadPlan, asked: list[int], num: int | None, shown: bool = True
) -> tuple[list[RequestResult], LoadRun, monitor.CpuMonitor]:
    """`num`: processes to do it with, None for as many as it takes."""
    load = LoadRun()
    display = monitor.display(len(plan.requests)) if shown else monitor.NoLoadDisplay()
    watched = monitor.CpuMonitor(load, display)
    streams = plan.max_concurrency or len(plan.requests)

    async def measure() -> Callable[[], list[RequestResult]]:
        async with watched:
            return await processes.run(target, plan, asked, load, num or processes.num_for(streams))

    with client.QuietProcess(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            read = runner.run(measure())
        except OSError as e:
            raise BenchError(f"{target.host}: {e.strerror or e}") from e
    return read(), load, watched


def _report(
    given: argparse.Namespace,
    model: str,
    found: OpenAIServer,
    load: LoadRun,
    watched: monitor.CpuMonitor,
    outcomes: list[RequestResult],
    limits: dict[str, float],
) -> report.ServeReport:
    late_s = [] if math.isinf(given.request_rate) else [max(0.0, one.sent_s - one.due_s) for one in outcomes]
    settings = {name: value for name, value in vars(given).items() if name != "api_key"}
    return report.ServeReport(
        version=blockyard.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        url=found.base_url,
        model=model,
        settings=settings | {"request_rate": str(given.request_rate), "burstiness": str(given.burstiness)},
        summary=metrics.summarize(outcomes, load.ended_s - load.started_s, limits),
        client=report.ClientLoad(watched.cpu_share, watched.peak_cpu_share, spread(late_s, 1000)),
        failures=metrics.failures(outcomes),
        requests=report.requests(outcomes, load.started_s),
    )
