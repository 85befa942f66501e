"""`blockyard bench serve`: sends a workload to a running server and reports its latencies and throughput."""

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Callable, Sequence

import msgspec
import uvloop

import blockyard
from blockyard.services.bench import datasets, flags, metrics, report, server, workload
from blockyard.services.bench.datasets import PromptMaker, SampleRequest
from blockyard.services.bench.load import client, processes
from blockyard.services.bench.load.client import Endpoint, LoadPlan, LoadRun
from blockyard.services.bench.load.monitor import CpuMonitor, progress_bar
from blockyard.services.bench.load.results import BenchError, RequestResult
from blockyard.services.bench.server import OpenAIServer
from blockyard.shared.errors import ConfigError
from blockyard.shared.percentiles import percentiles_of

WARM_UP_OUTPUT = 16  # tokens
QUERY_TOKENS = 16  # of rerank


def main(args: Sequence[str]) -> int:
    """Returns 1 if no request completed, or with --ignore-eos one had another length. Raises BlockyardError."""
    options = flags.serve_parser().parse_args(list(args))
    workload.check(options)
    check_pooling(options)
    limits = metrics.read_limits(options.goodput)
    extra = read_extra(options.extra_body)
    found = server.find(options.base_url, options.api_key)
    model = options.model or found.first_model()
    make_prompt = _prompt_maker(options, found, model)
    count = _counter(found, model) if options.dataset_path else datasets.estimate_tokens
    requests = workload.requests(options, make_prompt, count)
    if options.endpoint in report.POOLING_ENDPOINTS:
        requests = workload.without_output(requests)
    endpoint = found.endpoint(options.endpoint)

    def encode(request: SampleRequest) -> bytes:
        return endpoint.request(fields_of(options, model, request, make_prompt) | extra)

    _warm_up(options, endpoint, make_prompt, requests[0], encode)
    rng = random.Random(options.seed + 1)  # other numbers than the prompts'
    due_s = workload.due_times(len(requests), options.request_rate, options.burstiness, rng)
    plan = LoadPlan([encode(request) for request in requests], due_s, options.max_concurrency, options.timeout)
    output_lens = [request.num_output for request in requests]
    results, load, cpu = _run(endpoint, plan, output_lens, options.client_processes)
    late_s = [] if math.isinf(options.request_rate) else [max(0.0, one.sent_s - one.due_s) for one in results]
    settings = {name: value for name, value in vars(options).items() if name != "api_key"}
    done = report.ServeReport(
        version=blockyard.__version__,
        date=report.date(),
        url=found.base_url,
        model=model,
        settings=settings | {"request_rate": str(options.request_rate), "burstiness": str(options.burstiness)},
        summary=metrics.summarize(results, load.ended_s - load.started_s, limits),
        client=report.ClientLoad(cpu.cpu_share, cpu.peak_cpu_share, percentiles_of(late_s, 1000)),
        failures=metrics.failures(results),
        requests=report.request_rows(results, load.started_s),
    )
    print(report.text(done))
    if options.output:
        report.write(options.output, report.as_json(done))
    if options.html:
        report.write(options.html, report.page(done, results, load.started_s).encode())
    wrong_length = options.ignore_eos and done.summary.requests_off_length > 0
    return 1 if wrong_length or not done.summary.completed else 0


def check_pooling(options: argparse.Namespace) -> None:
    """Raises ConfigError for flags that the endpoint does not have."""
    if options.endpoint not in report.POOLING_ENDPOINTS:
        if options.batch_size > 1:
            raise ConfigError(f"--batch-size: {options.endpoint} takes one prompt a request")
        return
    if options.output_len or options.ignore_eos:
        flag = "--output-len" if options.output_len else "--ignore-eos"
        raise ConfigError(f"{flag}: --endpoint {options.endpoint} generates nothing")
    if wrong := [word for word in options.goodput if not word.startswith("e2el:")]:
        raise ConfigError(f"--goodput {wrong[0]}: --endpoint {options.endpoint} has e2el alone")


def fields_of(
    options: argparse.Namespace, model: str, request: SampleRequest, make_prompt: PromptMaker
) -> dict[str, object]:
    """Returns the request's JSON body. The other texts of a batch are of the length of the first one."""
    if options.endpoint not in report.POOLING_ENDPOINTS:
        return body(options, model, request)
    rng = random.Random(str(request.prompt))
    texts = [request.prompt, *(make_prompt(rng, request.num_input) for _ in range(options.batch_size - 1))]
    if options.endpoint == "embeddings":
        return {"model": model, "input": texts, "encoding_format": "base64"}
    query = make_prompt(rng, QUERY_TOKENS)
    return {"model": model, "query": query, "documents": texts, "return_documents": False}


def body(options: argparse.Namespace, model: str, request: SampleRequest) -> dict[str, object]:
    """Returns the request's JSON body."""
    fields: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": options.temperature,
    }
    if options.endpoint == "chat":
        fields |= {
            "messages": [{"role": "user", "content": request.prompt}],
            "max_completion_tokens": request.num_output,
        }
    else:
        fields |= {"prompt": request.prompt, "max_tokens": request.num_output}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def read_extra(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as e:
        raise ConfigError(f"--extra-body {text}: not a JSON object: {e}") from e


def _prompt_maker(options: argparse.Namespace, found: OpenAIServer, model: str) -> PromptMaker:
    if options.endpoint == "completions":
        return datasets.RandomIds(*flags.vocab_range(options.vocab_range))
    try:
        num = found.num_tokens(model, " ".join(datasets.WORDS))
    except BenchError:
        return datasets.RandomWords()
    return datasets.RandomWords(max(num, 1) / len(datasets.WORDS))


def _counter(found: OpenAIServer, model: str) -> Callable[[str], int]:
    """Returns a function that counts a text's tokens by /tokenize, or estimates them if the server has none."""
    try:
        found.num_tokens(model, "a")
    except BenchError as e:
        print(f"lengths are estimated at {datasets.CHARS_PER_TOKEN:g} characters a token: {e}", file=sys.stderr)
        return datasets.estimate_tokens
    return lambda text: found.num_tokens(model, text)


def _warm_up(
    options: argparse.Namespace,
    endpoint: Endpoint,
    make_prompt: PromptMaker,
    like: SampleRequest,
    encode: Callable[[SampleRequest], bytes],
) -> None:
    """Sends prompts that the run does not repeat, so that none of its prefixes is cached. Raises BenchError."""
    rng = random.Random(options.seed - 1)
    num_output = min(like.num_output, WARM_UP_OUTPUT)
    prompts = [make_prompt(rng, like.num_input) for _ in range(options.warmups)]
    bodies = [encode(SampleRequest(prompt, like.num_input, num_output)) for prompt in prompts]
    plan = LoadPlan(bodies, [0.0] * len(bodies), 1, options.timeout)
    results, _, _ = _run(endpoint, plan, [num_output] * len(bodies), 1, shown=False)
    for one in results:
        if one.failure:
            raise BenchError(f"the first request failed: {one.failure}")


def _run(
    endpoint: Endpoint, plan: LoadPlan, output_lens: list[int], num: int | None, shown: bool = True
) -> tuple[list[RequestResult], LoadRun, CpuMonitor]:
    """`num`: number of client processes, None to derive it from the streams."""
    load = LoadRun()
    cpu = CpuMonitor(load, progress_bar(len(plan.requests)) if shown else None)
    streams = plan.max_concurrency or len(plan.requests)

    async def measure() -> Callable[[], list[RequestResult]]:
        async with cpu:
            return await processes.run(endpoint, plan, output_lens, load, num or processes.num_for(streams))

    with client.QuietProcess(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            read = runner.run(measure())
        except OSError as e:
            raise BenchError(f"{endpoint.host}: {e.strerror or e}") from e
    return read(), load, cpu
