"""`blockyard bench latency` and `throughput`: measure a model through `blockyard.LLM`, without HTTP."""

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence

import blockyard
from blockyard.services.bench import flags, report, workload
from blockyard.services.bench.datasets import RandomIds, SampleRequest
from blockyard.services.bench.load.results import BenchError
from blockyard.services.offline.llm import LLM
from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.shared.config import parsed_flags
from blockyard.shared.errors import ConfigError
from blockyard.shared.percentiles import Percentiles, percentiles_head, percentiles_of, percentiles_row

Figures = dict[str, float | Percentiles | None]


def latency(args: Sequence[str]) -> int:
    """Raises BlockyardError."""
    options, model, engine = read(flags.latency_parser(), args)
    vocab = flags.vocab_range(options.vocab_range)
    with LLM(model, **engine) as llm:
        make_prompt, rng = _prompt_maker(vocab, llm), random.Random(options.seed)
        seconds = []
        for _ in range(options.num_iters_warmup + options.num_iters):
            prompts = [make_prompt(rng, options.input_len) for _ in range(options.batch_size)]  # new: none is cached
            requests = [SampleRequest(prompt, options.input_len, options.output_len) for prompt in prompts]
            seconds.append(timed(llm, requests, show_bar=False))
    values = percentiles_of(seconds[options.num_iters_warmup :], 1000)
    assert values is not None, "at least one iteration"
    figures: Figures = {
        "latency_ms": values,
        "per_output_token_ms": values.p50 / options.output_len,
        "output_tokens_per_s": 1000 * options.batch_size * options.output_len / values.mean,
    }
    _report("latency", options, model, engine, figures)
    print(
        f"{options.batch_size} prompts of {options.input_len} tokens, {options.output_len} tokens out each,"
        f" {options.num_iters} times"
    )
    print(percentiles_head("ms"), percentiles_row("batch", values), sep="\n")
    print(
        f"{figures['per_output_token_ms']:.3f} ms an output token (p50),"
        f" {figures['output_tokens_per_s']:,.1f} tokens out/s"
    )
    return 0


def throughput(args: Sequence[str]) -> int:
    """Raises BlockyardError."""
    options, model, engine = read(flags.throughput_parser(), args)
    workload.check(options)
    vocab = flags.vocab_range(options.vocab_range)
    with LLM(model, **engine) as llm:
        make_prompt, tokenizer = _prompt_maker(vocab, llm), llm.get_tokenizer()
        requests = workload.requests(options, make_prompt, lambda text: len(tokenizer.encode(text)))
        warm_up = SampleRequest(make_prompt(random.Random(options.seed - 1), 8), 8, 8)
        timed(llm, [warm_up], show_bar=False)
        seconds = timed(llm, requests, show_bar=sys.stderr.isatty())
    num_input, num_output = (
        sum(request.num_input for request in requests),
        sum(request.num_output for request in requests),
    )
    figures: Figures = {
        "duration_s": seconds,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "requests_per_s": len(requests) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_input + num_output) / seconds,
    }
    _report("throughput", options, model, engine, figures)
    print(f"{len(requests):,} requests in {seconds:.2f} s: {num_input:,} tokens in, {num_output:,} out")
    print(
        f"{len(requests) / seconds:,.2f} requests/s, {num_output / seconds:,.1f} tokens out/s,"
        f" {(num_input + num_output) / seconds:,.1f} tokens in and out/s"
    )
    return 0


def read(parser: flags.Parser, args: Sequence[str]) -> tuple[argparse.Namespace, str | None, dict[str, object]]:
    """Returns the benchmark's flags, the model, and the flags of `serve` as keywords of LLM. Raises ConfigError."""
    options, rest = parser.parse_known_args(list(args))
    keywords, positionals = engine_keywords(rest)
    if len(positionals) > 1:
        raise ConfigError(f"expected one model, got {' '.join(positionals)}")
    named = keywords.pop("model", None)
    if named is not None and positionals:
        raise ConfigError(f"model {positionals[0]} and --model {named}: give one")
    model = positionals[0] if positionals else named
    return options, None if model is None else str(model), keywords | {"seed": options.seed}


def engine_keywords(words: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Returns flags of `blockyard serve` as keywords of LLM, and the positional arguments. Raises ConfigError."""
    engine, positionals = parsed_flags.from_command_line(words)
    return {name.replace("-", "_"): one.value for name, one in engine.items()}, positionals


def timed(llm: LLM, requests: Sequence[SampleRequest], show_bar: bool) -> float:
    """Returns the seconds `generate` takes. Raises BenchError if an output has another length than requested."""
    params = [SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True) for request in requests]
    prompts = [request.prompt for request in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=show_bar)
    seconds = time.perf_counter() - start
    for request, output in zip(requests, outputs, strict=True):
        got = len(output.outputs[0].token_ids)
        if got != request.num_output:
            raise BenchError(f"request {output.request_id} has {got} tokens instead of {request.num_output}")
    return seconds


def _prompt_maker(vocab: tuple[int, int], llm: LLM) -> RandomIds:
    low, high = vocab
    size = len(llm.get_tokenizer())
    if low >= size:
        raise ConfigError(f"--vocab-range {low}:{high}: the model has {size} tokens")
    return RandomIds(low, min(high, size))


def _report(
    command: str, options: argparse.Namespace, model: str | None, engine: Mapping[str, object], figures: Figures
) -> None:
    if options.output:
        settings = (model, vars(options), dict(engine), figures)
        done = report.OfflineReport(command, blockyard.__version__, report.date(), *settings)
        report.write(options.output, report.as_json(done))
