"""`blockyard bench latency` and `throughput`: the services without HTTP, through `blockyard.LLM`."""

import argparse
import datetime
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import blockyard
from blockyard.services.bench import flags, report, workload
from blockyard.services.bench.datasets import RandomIds, SampleRequest
from blockyard.services.bench.server import BenchError
from blockyard.services.offline.llm import LLM
from blockyard.services.offline.outputs import RequestOutput
from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.shared.config import given as given_flags
from blockyard.shared.errors import ConfigError
from blockyard.shared.spread import Spread, spread, spread_head, spread_row

Figures = dict[str, float | Spread | None]


def latency(args: Sequence[str]) -> int:
    """Raises BlockyardError."""
    given, model, engine = read(flags.latency_parser(), args)
    vocab = flags.vocab_range(given.vocab_range)
    with LLM(model, **engine) as llm:
        draw, rng = _draw(vocab, llm), random.Random(given.seed)
        seconds = []
        for _ in range(given.num_iters_warmup + given.num_iters):
            prompts = [draw(rng, given.input_len) for _ in range(given.batch_size)]  # anew: none is cached
            asks = [SampleRequest(prompt, given.input_len, given.output_len) for prompt in prompts]
            seconds.append(timed(llm, asks, show_bar=False))
    values = spread(seconds[given.num_iters_warmup :], 1000)
    assert values is not None, "at least one iteration"
    figures: Figures = {
        "latency_ms": values,
        "per_output_token_ms": values.p50 / given.output_len,
        "output_tokens_per_s": 1000 * given.batch_size * given.output_len / values.mean,
    }
    _report("latency", given, model, engine, figures)
    print(
        f"{given.batch_size} prompts of {given.input_len} tokens, {given.output_len} tokens out each,"
        f" {given.num_iters} times"
    )
    print(spread_head("ms"), spread_row("batch", values), sep="\n")
    print(
        f"{figures['per_output_token_ms']:.3f} ms an output token (p50),"
        f" {figures['output_tokens_per_s']:,.1f} tokens out/s"
    )
    return 0


def throughput(args: Sequence[str]) -> int:
    """Raises BlockyardError."""
    given, model, engine = read(flags.throughput_parser(), args)
    workload.check(given)
    vocab = flags.vocab_range(given.vocab_range)
    with LLM(model, **engine) as llm:
        draw, tokenizer = _draw(vocab, llm), llm.get_tokenizer()
        asks = workload.asks(given, draw, lambda text: len(tokenizer.encode(text)))
        timed(
            llm, [SampleRequest(draw(random.Random(given.seed - 1), 8), 8, 8)], show_bar=False
        )  # what happens once, happens now
        seconds = timed(llm, asks, show_bar=sys.stderr.isatty())
    num_input, num_output = sum(ask.num_input for ask in asks), sum(ask.num_output for ask in asks)
    figures: Figures = {
        "duration_s": seconds,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "requests_per_s": len(asks) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_input + num_output) / seconds,
    }
    _report("throughput", given, model, engine, figures)
    print(f"{len(asks):,} requests in {seconds:.2f} s: {num_input:,} tokens in, {num_output:,} out")
    print(
        f"{len(asks) / seconds:,.2f} requests/s, {num_output / seconds:,.1f} tokens out/s,"
        f" {(num_input + num_output) / seconds:,.1f} tokens in and out/s"
    )
    return 0


def read(parser: flags.Parser, args: Sequence[str]) -> tuple[argparse.Namespace, str | None, dict[str, object]]:
    """The benchmark's flags, the model, and the flags of `blockyard serve` as keywords of LLM. Raises ConfigError."""
    given, rest = parser.parse_known_args(list(args))
    engine, positionals = given_flags.from_command_line(rest)
    if len(positionals) > 1:
        raise ConfigError(f"expected one model, got {' '.join(positionals)}")
    keywords = {name.replace("-", "_"): one.value for name, one in engine.items() if name != "model"}
    named = engine["model"].value if "model" in engine else None
    if named is not None and positionals:
        raise ConfigError(f"model {positionals[0]} and --model {named}: which one?")
    model = positionals[0] if positionals else named
    return given, None if model is None else str(model), keywords | {"seed": given.seed}


def timed(llm: LLM, asks: Sequence[SampleRequest], show_bar: bool) -> float:
    """Seconds that `generate` takes. Raises BenchError if a text has not the length asked for."""
    params = [SamplingParams(temperature=0.0, max_tokens=ask.num_output, ignore_eos=True) for ask in asks]
    prompts = [ask.prompt for ask in asks]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=show_bar)
    seconds = time.perf_counter() - start
    check_lengths(asks, outputs)
    return seconds


def check_lengths(asks: Sequence[SampleRequest], outputs: Sequence[RequestOutput]) -> None:
    """Raises BenchError."""
    for ask, output in zip(asks, outputs, strict=True):
        got = len(output.outputs[0].token_ids)
        if got != ask.num_output:
            raise BenchError(f"request {output.request_id} has {got} tokens instead of {ask.num_output}")


def _draw(vocab: tuple[int, int], llm: LLM) -> RandomIds:
    low, high = vocab
    size = len(llm.get_tokenizer())
    if low >= size:
        raise ConfigError(f"--vocab-range {low}:{high}: the model has {size} tokens")
    return RandomIds(low, min(high, size))


def _report(
    command: str, given: argparse.Namespace, model: str | None, engine: Mapping[str, object], figures: Figures
) -> None:
    if given.output:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        done = report.OfflineReport(command, blockyard.__version__, date, model, vars(given), dict(engine), figures)
        report.write(Path(given.output), report.as_json(done))
