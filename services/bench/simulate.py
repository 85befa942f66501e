"""`blockyard simulate`: runs the scheduler on a trace in virtual time, or generates a trace."""

import argparse
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from blockyard.services.bench import datasets, metrics
from blockyard.services.bench.flags import Parser, count, positive
from blockyard.services.bench.workload import due_times
from blockyard.services.launcher import sources
from blockyard.services.launcher.supervision import child
from blockyard.shared.config import host_memory, parsed_flags, resolve, worker_roles
from blockyard.shared.config.checkpoint import Checkpoint, asked_length
from blockyard.shared.config.flags import FLAGS, GROUPS
from blockyard.shared.config.flags.roles import ROLE_NAMES
from blockyard.shared.config.parsed_flags import ParsedFlag, Values
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.simulation import (
    CostModel,
    LatencyLimits,
    SimulatedKill,
    SimulatedRole,
    SimulationConfig,
)
from blockyard.shared.config.services.worker import USUAL_SEQS
from blockyard.shared.config.worker_roles import WorkersOfRole
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVRole

KINDS = ("sharegpt", "random", "prefix-shared")
# Flags of `serve` that change a simulation, besides those that become scheduler settings.
_OF_WORKERS = ("max-num-seqs", "max-num-batched-tokens", "num-gpu-blocks-override", "swap-space")
USED_FLAGS = (
    {flag.name for flag in GROUPS["Scheduling"]}
    | {*_OF_WORKERS, "block-size", "config", "data-parallel-size", "log-level", "max-model-len", "model"}
    | {f"{role}-workers" for role in ROLE_NAMES}
    | {f"{role}.{name}" for role in ROLE_NAMES for name in _OF_WORKERS}
)
EPILOG = """
The scheduler's flags of `blockyard serve` may follow: --max-num-seqs, --max-num-batched-tokens, --scheduling-policy,
... --num-gpu-blocks-override and --block-size set a worker's KV blocks, --swap-space those in host memory.
With --prefill-workers and --decode-workers, prompts are computed on the first and continued on the second; a role may
have its own --prefill.max-num-batched-tokens, --decode.max-num-seqs, ....

A trace has one JSON object per line: arrival_s, prompt_tokens, output_tokens, and optionally max_tokens (the requested
limit, if above output_tokens), tenant, priority, prefix_group (requests of a group share their first tokens),
prefix_tokens (how many; by default as many as the shorter prompt has) and n (choices).

    blockyard simulate --generate sharegpt --requests 10000 --rate 20 > trace.jsonl
    blockyard simulate trace.jsonl --max-num-seqs 128
    blockyard simulate trace.jsonl --prefill-workers 4 --decode-workers 6 --decode.max-num-batched-tokens 512
    blockyard simulate trace.jsonl --workers 10 --goodput ttft:1000 itl:8
"""


def main(args: Sequence[str]) -> int:
    """Replaces this process with the simulator, or writes a trace to stdout. Raises ConfigError."""
    parsed, rest = parser().parse_known_args(list(args))
    if parsed.generate and rest:
        raise ConfigError(f"--generate: takes no other flags than those of the trace, got {rest[0]}")
    if parsed.generate:
        sys.stdout.writelines(generate(parsed))
    elif parsed.print_cost:
        print(msgspec.json.format(msgspec.json.encode(read_cost(parsed.cost))).decode())
    else:
        child.exec_service("scheduler.simulator", simulation_config(parsed, rest))
    return 0


def parser() -> Parser:
    made = Parser(
        prog="blockyard simulate",
        usage="blockyard simulate TRACE [flags]   or   blockyard simulate --generate KIND [flags] > TRACE",
        description="Runs the scheduler on a trace in virtual time, with workers that take as long as --cost says.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument_group("simulation").add_argument
    add("--workers", type=count, help="worker groups (--data-parallel-size)")
    add("--cost", metavar="FILE", help="cost model of a step as JSON (default: Llama-3.1-8B in bf16 on one H200)")
    add("--print-cost", action="store_true", help="print the cost model as JSON and exit")
    add("--html", metavar="FILE", help="report with charts (default: the trace's name with .html, in this folder)")
    add("--svg", metavar="FILE", help="charts of queue, batch, blocks and throughput")
    add = made.add_argument_group("prefill and decode workers").add_argument
    add("--kv-link-gb-per-s", type=positive, metavar="GB", help="KV blocks from worker to worker (the cost model's)")
    add("--kv-link-latency-us", type=positive, metavar="US", help="from the last byte sent to the receiver's notice")
    add("--kv-link-unstreamed", action="store_true", help="blocks leave when their step ends, not layer by layer")
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="find the split of all workers into prefill and decode workers with the most requests a second within "
        "limits of the 99th percentiles, ttft:1000 itl:8; the trace is played faster or slower",
    )
    add("--kill", nargs="+", default=[], metavar="ROLE@S", help="a worker dies at that second: prefill@10 decode@12.5")
    add("--restart-s", type=positive, default=10.0, help="from such a death to the next worker's start (%(default)s)")
    add = made.add_argument_group("trace").add_argument
    add("--generate", choices=KINDS, help="write a trace to stdout")
    add("--requests", type=count, default=1000, help="(%(default)s)")
    add("--rate", type=positive, default=10.0, help="requests a second; inf: all at once (%(default)s)")
    add("--burstiness", type=positive, default=1.0, help="1: Poisson, less: bursty (%(default)s)")
    add("--input-len", default="1024", metavar="N|LOW:HIGH", help="tokens in, not of sharegpt (%(default)s)")
    add("--output-len", default="128", metavar="N|LOW:HIGH", help="tokens out, not of sharegpt (%(default)s)")
    add("--prefix-len", type=count, default=512, help="of prefix-shared, before the input (%(default)s)")
    add("--num-prefixes", type=count, default=10, help="of prefix-shared (%(default)s)")
    add("--tenant", default="", help="tenant of all requests; join traces with `cat`")
    add("--priority", type=int, default=0, help="priority of all requests (%(default)s)")
    add("--choices", type=count, default=1, help="choices (n) of each request (%(default)s)")
    add("--trace-seed", type=int, default=0, help="(%(default)s)")
    return made


def simulation_config(parsed: argparse.Namespace, rest: Sequence[str]) -> SimulationConfig:
    """Raises ConfigError, also for flags of `serve` that have no effect in a simulation."""
    cost = _with_link(read_cost(parsed.cost), parsed)
    line, _ = parsed_flags.from_command_line(rest)
    for name, one in line.items():
        if name not in USED_FLAGS and not any(to.lstrip("!").startswith("scheduler.") for to in FLAGS[name].to):
            raise ConfigError(f"{one.where}: has no effect in a simulation; see `blockyard simulate --help`")
    values, positionals, notes = sources.read(rest, os.environ)
    if len(positionals) != 1:
        raise ConfigError(f"expected one trace, got {' '.join(positionals) or 'none'}")
    for note in (*notes, *values.notes()):
        print(note, file=sys.stderr)
    if values["device"] == "auto":  # the cost model describes a GPU
        values = values.with_given({"device": ParsedFlag("cuda", "device")})
    if parsed.workers:
        values = values.with_given({"data-parallel-size": ParsedFlag(parsed.workers, "--workers")})
    workers = worker_roles.workers_to_start(values)
    trace = "/dev/stdin" if positionals[0] == "-" else positionals[0]
    max_model_len = asked_length(values) or cost.max_model_len
    bus = BusConfig(registry="ipc://none", bind="ipc://none")
    process = resolve.process_config(values, "simulator", bus)
    config = {"max_position_embeddings": max_model_len}
    model = Checkpoint(name=cost.name, path=Path(), tokenizer_path=Path(), config=config)
    return SimulationConfig(
        process=process,
        scheduler=resolve.scheduler(_with_model_name(values), model, process, [each.values for each in workers]),
        trace=trace,
        cost=cost,
        roles=[_role(each, model, cost) for each in workers],
        goodput=_limits(parsed.goodput) if parsed.goodput else None,
        kills=[_kill(word) for word in parsed.kill],
        restart_s=parsed.restart_s,
        block_size=values.get("block-size", int),
        max_model_len=max_model_len,
        html=parsed.html or f"{'simulation' if positionals[0] == '-' else Path(trace).stem}.html",
        svg=parsed.svg or "",
    )


def _role(workers: WorkersOfRole, model: Checkpoint, cost: CostModel) -> SimulatedRole:
    values = workers.values
    return SimulatedRole(
        role=workers.role or KVRole.BOTH,
        num_workers=workers.num_workers,
        max_num_seqs=values.maybe("max-num-seqs", int) or USUAL_SEQS,
        max_num_batched_tokens=resolve.step_tokens(values, model),
        num_blocks=values.maybe("num-gpu-blocks-override", int) or cost.num_blocks,
        num_host_blocks=_host_blocks(values, cost),
    )


def _limits(words: Sequence[str]) -> LatencyLimits:
    found = metrics.read_limits(words)
    if found.keys() != {"ttft", "itl"}:
        raise ConfigError(f"--goodput {' '.join(words)}: expected both limits, such as ttft:1000 itl:8, and no other")
    return LatencyLimits(ttft_ms=found["ttft"], itl_ms=found["itl"])


def _kill(word: str) -> SimulatedKill:
    """Parses `prefill@12.5`. Raises ConfigError."""
    role, _, at_s = word.partition("@")
    try:
        return SimulatedKill(KVRole(role), float(at_s))
    except ValueError:
        expected = f"{', '.join(KVRole)} and the second, such as decode@12.5"
        raise ConfigError(f"--kill {word}: expected {expected}") from None


def _with_link(cost: CostModel, parsed: argparse.Namespace) -> CostModel:
    changes: dict[str, object] = {}
    if parsed.kv_link_gb_per_s:
        changes["link_bytes_s"] = 1e9 * parsed.kv_link_gb_per_s
    if parsed.kv_link_latency_us:
        changes["link_latency_s"] = 1e-6 * parsed.kv_link_latency_us
    if parsed.kv_link_unstreamed:
        changes["stream_layers"] = False
    return msgspec.structs.replace(cost, **changes)


def _host_blocks(values: Values, cost: CostModel) -> int:
    size = host_memory.swap_space(values) * host_memory.GIB
    return int(size) // (values.get("block-size", int) * cost.token_bytes)


def read_cost(path: str | None) -> CostModel:
    """Raises ConfigError."""
    if path is None:
        return CostModel()
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=CostModel)
    except OSError as e:
        raise ConfigError(f"--cost {path}: {e.strerror}") from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"--cost {path}: {e}") from e


def generate(parsed: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of a trace, the same for the same seed."""
    rng = random.Random(parsed.trace_seed)
    common: dict[str, object] = {}
    for name, value in (("tenant", parsed.tenant), ("priority", parsed.priority)):
        if value:
            common[name] = value
    if parsed.choices > 1:
        common["n"] = parsed.choices
    due = due_times(parsed.requests, parsed.rate, parsed.burstiness, rng)
    for at, (num_input, num_output, more) in zip(due, _lengths(parsed, rng), strict=True):
        row = {"arrival_s": round(at, 6), "prompt_tokens": num_input, "output_tokens": num_output}
        yield msgspec.json.encode(row | more | common).decode() + "\n"


def _lengths(parsed: argparse.Namespace, rng: random.Random) -> Iterator[tuple[int, int, dict[str, object]]]:
    """Yields (input tokens, output tokens, more fields) of each request."""
    num = parsed.requests
    if parsed.generate == "sharegpt":
        for request in datasets.sharegpt_requests(num, datasets.RandomIds(0, 1), rng):
            yield request.num_input, request.num_output, {}
        return
    inputs = datasets.lengths(parsed.input_len, 0.0, "--input-len")
    outputs = datasets.lengths(parsed.output_len, 0.0, "--output-len")
    prefix = parsed.prefix_len if parsed.generate == "prefix-shared" else 0
    for _ in range(num):
        more: dict[str, object] = {}
        if prefix:
            more = {"prefix_group": str(rng.randrange(parsed.num_prefixes)), "prefix_tokens": prefix}
        yield prefix + inputs.sample(rng), outputs.sample(rng), more


def _with_model_name(values: Values) -> Values:
    return values if values.is_given("model") else values.with_given({"model": ParsedFlag("simulated", "model")})
