"""Forced tool calls of each format through all services: how many are read back, with arguments valid by their schema.

    PYTHONPATH=.src:tests/bench:tests/support python tests/bench/structured_output/bench_tool_calls.py
        [--device cuda] [--sets 20]

One ring serves the demo model, with a gateway (`blockyard run api-gateway --tool-call-parser NAME`) for each format. It
answers requests at temperature 1 with random sets of 1 to 4 tools of `tests/support/json_schemas.py`: half of them with
`tool_choice: required`, half with a named tool. The demo model was trained on none of the formats: the grammar gives
its answers their form. An answer counts as failed if its calls are not those of the choice, arguments are not valid by
jsonschema (formats included), or text is beside them. Values of the schemas are short and the end of the text is made
likelier, so that answers end: one that reaches the limit of tokens is printed and asked for once more with another
seed, and fails too if text is beside its calls. Sets whose grammar is refused are replaced by another one. The exit
status is 1 if a format has failures or less than `--sets` answers. Most of the time is the demo model's.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from json_schemas import bounded, random_schema, validate
from rig import ROOT, Server, serve, wait_ready

from blockyard.shared.tool_parsers.registry import FORMATS

NO_PARSER = "(none)"  # the grammar of models without a format of their own
MAX_TOKENS = 500
END_BIAS = {"1": 3, "3": 3}  # the demo model's ends of text, or it writes the same call up to the limit of calls
TRIES = 2  # seeds for answers that reach the limit
AT_ONCE = 24  # requests to one gateway
CUT_CHARS = 1000  # printed of an answer that reaches the limit
NAMES = ("get_weather", "search.files", "a", "note-2", "Find_All", "x" * 40)


@dataclass(frozen=True)
class ToolSet:
    """A request's tools, and what its answer may call."""

    schemas: dict[str, dict[str, Any]]
    choice: object
    parallel: bool

    @property
    def callable(self) -> set[str]:
        return {self.choice["function"]["name"]} if isinstance(self.choice, dict) else set(self.schemas)

    @property
    def fields(self) -> dict[str, Any]:
        functions = [{"name": name, "parameters": schema} for name, schema in self.schemas.items()]
        tools = [{"type": "function", "function": function} for function in functions]
        return {"tools": tools, "tool_choice": self.choice, "parallel_tool_calls": self.parallel}


@dataclass
class Row:
    """Counts of one format."""

    parser: str
    ok: int = 0
    calls: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    cut_texts: list[str] = field(default_factory=list)


def tool_set(seed: int) -> ToolSet:
    rng = random.Random(seed)
    schemas = {}
    for name in rng.sample(NAMES, rng.randint(1, 4)):
        schema: dict[str, Any] = {}
        while schema.get("type") != "object":
            schema = bounded(random_schema(rng.randrange(1 << 30)))
        schemas[name] = schema
    named = {"type": "function", "function": {"name": rng.choice(sorted(schemas))}}
    return ToolSet(schemas, named if seed % 2 else "required", rng.random() < 0.5)


def fault(asked: ToolSet, message: Any) -> str:
    """What is wrong with an answer; empty: nothing."""
    calls = message.tool_calls or []
    if message.content or not calls or (len(calls) > 1 and not asked.parallel):
        return f"{len(calls)} calls beside the text {message.content!r}"
    if len({call.id for call in calls}) != len(calls):
        return "two calls have one id"
    for call in calls:
        if call.function.name not in asked.callable:
            return f"calls {call.function.name}, not one of {sorted(asked.callable)}"
        try:
            validate(call.function.arguments, asked.schemas[call.function.name])
        except ValueError as e:
            return f"{call.function.arguments!r} of {json.dumps(asked.schemas[call.function.name])}: {e}"
    return ""


async def ask(client: openai.AsyncOpenAI, seed: int, row: Row) -> bool:
    """Asks for calls of one set. True if there was an answer to judge."""
    asked = tool_set(seed)
    for attempt in range(TRIES):
        try:
            answer = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "Which tool helps here?"}],
                max_tokens=MAX_TOKENS,
                temperature=1.0,
                frequency_penalty=0.5,
                logit_bias=END_BIAS,
                seed=seed * TRIES + attempt,
                **asked.fields,
            )
        except openai.BadRequestError as e:
            row.refused[str(e.body)[:160]] += 1
            return False
        except openai.APIError as e:
            row.failed.append(f"set {seed}: {type(e).__name__}: {e}")
            return True
        if answer.choices[0].finish_reason == "length":
            text = answer.choices[0].message.model_dump_json(exclude_none=True)
            row.cut_texts.append(f"set {seed} is cut: {text[:CUT_CHARS]}")
            if answer.choices[0].message.content:
                row.failed.append(f"set {seed}: a cut answer has the text {answer.choices[0].message.content!r}")
            continue
        said = fault(asked, answer.choices[0].message)
        if said:
            row.failed.append(f"set {seed}: {said}")
        else:
            row.ok += 1
            row.calls += len(answer.choices[0].message.tool_calls or [])
        return True
    return False


async def run(url: str, row: Row, num_sets: int) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        seed, judged = 0, 0
        while judged < num_sets and seed < 10 * num_sets:
            seeds = range(seed, seed + min(AT_ONCE, num_sets - judged))
            seed = seeds.stop
            judged += sum(await asyncio.gather(*(ask(client, one, row) for one in seeds)))


@contextlib.contextmanager
def gateway(run_dir: str, parser: str) -> Iterator[Server]:
    """Another gateway of the ring, with this format, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--run-dir", run_dir, "--name", f"api_gateway {parser}", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "blockyard", "run", "api-gateway", "demo", *flags, "--tool-call-parser", parser]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = Server(process, port, time.perf_counter())
        wait_ready(server)
        yield server
    finally:
        process.terminate()
        process.wait()


def measure(run_dir: str, url: str, parser: str, num_sets: int) -> Row:
    row = Row(parser)
    if parser == NO_PARSER:
        asyncio.run(run(url, row, num_sets))
        return row
    with gateway(run_dir, parser) as server:
        asyncio.run(run(server.url, row, num_sets))
    return row


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| format | answers read back | failed | calls | cut at the limit | sets refused |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        counts = (row.ok, len(row.failed), row.calls, len(row.cut_texts), row.refused.total())
        lines.append(f"| `{row.parser}` | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", type=int, default=20, help="tool sets of each format")
    parser.add_argument("--parsers", nargs="*", default=[NO_PARSER, *(one.name for one in FORMATS)])
    parser.add_argument("--gateways", type=int, default=2, help="formats that are measured side by side")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--log", type=Path, help="of the ring")
    args = parser.parse_args()
    began = time.monotonic()

    def measured(name: str) -> Row:
        row = measure(run_dir, server.url, name, args.sets)
        lines = row.failed + row.cut_texts
        spent = f"{time.monotonic() - began:.0f} s"
        print(f"{name}: {row.ok} of {args.sets} after {spent}", *lines, sep="\n  ", file=sys.stderr, flush=True)
        return row

    with (
        tempfile.TemporaryDirectory() as run_dir,
        serve("demo", "--device", args.device, "--run-dir", run_dir, log=args.log) as server,
        ThreadPoolExecutor(args.gateways) as threads,
    ):
        print(f"the ring was ready after {server.ready_s:.0f} s", file=sys.stderr, flush=True)
        rows = list(threads.map(measured, args.parsers))
    print(table(rows))
    print(f"{time.monotonic() - began:.0f} s")
    for row in rows:
        for cause, count in row.refused.most_common(3):
            print(f"{row.parser}: refused {count}: {cause}")
    sys.exit(any(row.failed or row.ok < args.sets for row in rows))


if __name__ == "__main__":
    main()
