"""Flags of `blockyard bench serve`, `latency` and `throughput`."""

import argparse
import math
from typing import NoReturn

from blockyard.services.bench import metrics
from blockyard.services.bench.report import POOLING_ENDPOINTS
from blockyard.shared.errors import ConfigError

DATASETS = ("random", "prefix-shared", "sharegpt")
TEXT_ENDPOINTS = ("completions", "chat")
DEFINITIONS = (metrics.__doc__ or "").partition("\n\n")[2].rstrip()


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong flags instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def serve_parser() -> Parser:
    parser = _parser("serve", "Sends requests to an OpenAI-compatible server and measures its streams.", EPILOG)
    add = parser.add_argument_group("server").add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="of the server, with or without /v1 (%(default)s)")
    add("--model", help="(the first model that the server lists)")
    add("--endpoint", choices=(*TEXT_ENDPOINTS, *POOLING_ENDPOINTS), default="completions", help="(%(default)s)")
    add("--api-key", help="(OPENAI_API_KEY)")
    add("--extra-body", metavar="JSON", default="{}", help="more fields for each request")
    _add_dataset(parser)
    add = parser.add_argument_group("requests").add_argument
    add("--temperature", type=float, default=0.0, help="(%(default)s)")
    add("--batch-size", type=count, default=1, help="embeddings, rerank: texts or documents a request (%(default)s)")
    add("--ignore-eos", action="store_true", help="request exactly the output length; another length is exit code 1")
    add("--request-rate", type=positive, default=math.inf, help="requests a second; inf: all at once (%(default)s)")
    add("--burstiness", type=positive, default=1.0, help="1: Poisson, less: bursty, inf: constant gaps (%(default)s)")
    add("--max-concurrency", type=count, help="most requests running at once; the others are sent later")
    add(
        "--client-processes",
        type=count,
        help="processes that send the load (one per 128 concurrent requests, with four cores each)",
    )
    add("--timeout", type=positive, default=3600.0, help="seconds until a request fails (%(default)s)")
    add("--warmups", type=int, default=1, help="requests before the run, with other prompts (%(default)s)")
    add = parser.add_argument_group("report").add_argument
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="latency limits: ttft:500 itl:50 ...")
    add("--output", metavar="FILE", help="write the full report as JSON")
    add("--html", metavar="FILE", help="write plots: TTFT and ITL distributions, running requests")
    return parser


def latency_parser() -> Parser:
    text = "Times batches through `blockyard.LLM`: without HTTP, one batch after another, with new random prompts each."
    parser = _parser("latency", text, ENGINE)
    add = parser.add_argument
    add("--batch-size", type=count, default=8, help="prompts at once (%(default)s)")
    add("--input-len", type=count, default=32, help="tokens a prompt (%(default)s)")
    add("--output-len", type=count, default=128, help="output tokens a prompt (%(default)s)")
    add("--num-iters", type=count, default=30, help="timed batches (%(default)s)")
    add("--num-iters-warmup", type=int, default=10, help="untimed batches before (%(default)s)")
    _add_offline(parser)
    return parser


def throughput_parser() -> Parser:
    text = "Times one call of `blockyard.LLM.generate` with all prompts, each continued to its full length."
    parser = _parser("throughput", text, ENGINE)
    _add_dataset(parser)
    _add_offline(parser, seed=False)
    return parser


def _parser(name: str, text: str, epilog: str) -> Parser:
    return Parser(
        prog=f"blockyard bench {name}",
        description=text,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_dataset(parser: Parser) -> None:
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset", choices=DATASETS, default="random", help="(%(default)s)")
    add("--dataset-path", metavar="FILE", help="ShareGPT's JSON; without: the same lengths, random contents")
    add("--num-prompts", type=count, default=1000, help="(%(default)s)")
    add("--input-len", metavar="N|A:B", help="tokens, fixed or uniform from a range (1024)")
    add("--output-len", metavar="N|A:B", help="the same (128; with --dataset-path the length of the answers there)")
    add("--range-ratio", type=float, default=0.0, help="R turns N into the range N(1-R) to N(1+R) (%(default)s)")
    add("--prefix-len", type=count, default=512, help="prefix-shared: tokens before --input-len (%(default)s)")
    add("--num-prefixes", type=count, default=8, help="prefix-shared: number of prefixes (%(default)s)")
    add("--vocab-range", default="100:4000", metavar="A:B", help="range of random token ids (%(default)s)")
    add("--seed", type=int, default=0, help="of prompts and arrivals (%(default)s)")


def _add_offline(parser: Parser, seed: bool = True) -> None:
    add = parser.add_argument
    if seed:
        add("--vocab-range", default="100:4000", metavar="A:B", help="range of random token ids (%(default)s)")
        add("--seed", type=int, default=0, help="of prompts (%(default)s)")
    add("--output", metavar="FILE", help="write the report as JSON")


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def vocab_range(text: str) -> tuple[int, int]:
    """`100:4000`: ids from 100 to 3999. Raises ConfigError."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise ConfigError(f"--vocab-range {text}: expected a rising range such as 100:4000")
    return int(low), int(high)


ENGINE = "All other flags are those of `blockyard serve`; MODEL may stand before or after them."
EPILOG = f"""\
{DEFINITIONS.strip()}
Events with only a role or only a finish reason do not count as tokens. Token counts are the server's
(`stream_options.include_usage`). A failed request (also one answered with 429) counts in `failed` only.

--goodput counts the requests within all limits: ttft, tpot and e2el as above; the limit of itl applies to each gap."""
