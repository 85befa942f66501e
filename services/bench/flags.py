"""The flags of `blockyard bench`."""

import argparse
import math
from typing import NoReturn

from blockyard.services.bench import metrics
from blockyard.shared.errors import ConfigError

DATASETS = ("random", "prefix-shared", "sharegpt")
DEFINITIONS = (metrics.__doc__ or "").partition("\n\n")[2].rstrip()


class Parser(argparse.ArgumentParser):
    """Wrong flags are a ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def serve_parser() -> Parser:
    parser = _parser(
        "serve", "Sends requests to a server that speaks OpenAI's protocol and measures its streams.", EPILOG
    )
    add = parser.add_argument_group("server").add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="of the server, with or without /v1 (%(default)s)")
    add("--model", help="(the first that the server lists)")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="(%(default)s)")
    add("--api-key", help="(OPENAI_API_KEY)")
    add("--extra-body", metavar="JSON", default="{}", help="more fields for each request")
    _add_dataset(parser)
    add = parser.add_argument_group("requests").add_argument
    add("--temperature", type=float, default=0.0, help="(%(default)s)")
    add("--ignore-eos", action="store_true", help="ask for exactly the output length; another one is exit code 1")
    add("--request-rate", type=positive, default=math.inf, help="requests a second; inf: all at once (%(default)s)")
    add(
        "--burstiness", type=positive, default=1.0, help="1: Poisson, less: in bursts, inf: a steady beat (%(default)s)"
    )
    add("--max-concurrency", type=count, help="requests under way at most; others wait unsent")
    add(
        "--client-processes",
        type=count,
        help="that the load comes from (one for 128 requests at a time, if this machine has four cores for each)",
    )
    add("--timeout", type=positive, default=3600.0, help="seconds a request may take (%(default)s)")
    add("--warmups", type=int, default=1, help="requests before the run, with other prompts (%(default)s)")
    add = parser.add_argument_group("report").add_argument
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits a good request keeps: ttft:500 itl:50 ...")
    add("--output", metavar="FILE", help="everything as JSON")
    add("--html", metavar="FILE", help="plots in one file: TTFT and ITL distributions, running requests")
    return parser


def latency_parser() -> Parser:
    text = "Times batches through `blockyard.LLM`: without HTTP, one batch after the other, fresh random prompts each."
    parser = _parser("latency", text, ENGINE)
    add = parser.add_argument
    add("--batch-size", type=count, default=8, help="prompts at once (%(default)s)")
    add("--input-len", type=count, default=32, help="tokens a prompt (%(default)s)")
    add("--output-len", type=count, default=128, help="tokens a prompt is continued by (%(default)s)")
    add("--num-iters", type=count, default=30, help="batches that are timed (%(default)s)")
    add("--num-iters-warmup", type=int, default=10, help="batches before these (%(default)s)")
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
    add(
        "--dataset-path", metavar="FILE", help="conversations in ShareGPT's JSON; without: its lengths, random contents"
    )
    add("--num-prompts", type=count, default=1000, help="(%(default)s)")
    add("--input-len", metavar="N|A:B", help="tokens, fixed or uniform from a range (1024)")
    add("--output-len", metavar="N|A:B", help="the same (128; with --dataset-path as long as the answers there)")
    add("--range-ratio", type=float, default=0.0, help="R makes of N the range N(1-R) to N(1+R) (%(default)s)")
    add("--prefix-len", type=count, default=512, help="prefix-shared: tokens before --input-len (%(default)s)")
    add("--num-prefixes", type=count, default=8, help="prefix-shared: different ones (%(default)s)")
    add("--vocab-range", default="100:4000", metavar="A:B", help="random token ids lie in it (%(default)s)")
    add("--seed", type=int, default=0, help="of prompts and arrivals (%(default)s)")


def _add_offline(parser: Parser, seed: bool = True) -> None:
    add = parser.add_argument
    if seed:
        add("--vocab-range", default="100:4000", metavar="A:B", help="random token ids lie in it (%(default)s)")
        add("--seed", type=int, default=0, help="of prompts (%(default)s)")
    add("--output", metavar="FILE", help="figures as JSON")


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


ENGINE = "All other flags are those of `blockyard serve`, and MODEL may stand before or after them."
EPILOG = f"""\
{DEFINITIONS.strip()}
An answer's first event with a role and no text is no token, nor is one that only says how it ended. Token counts are
the server's own (`stream_options.include_usage`). A request that failed (429 too) counts in no figure but `failed`.

--goodput counts the requests within all limits: ttft, tpot and e2el as above; that of itl holds for each gap."""
