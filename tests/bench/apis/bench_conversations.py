"""Conversations of agents over HTTP, with a mock worker: `bench_conversations.py [--turns 20] [--kb 200]`; no turns: 0.

20 turns shaped as Claude Code's and as Codex's: the cached tokens of each turn, to the full blocks of the turn before.
Then chats of 200 KB, of which only the last message differs: the CPU time of gateway and tokenizers for one. To compare
that with an earlier commit, run this script there.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

from rig import Row, Server, serve, table

from blockyard.services.bench.suite import shapes

BLOCK = 16  # tokens
WORDS = ["read", "the", "file", "and", "change", "what", "its", "test", "expects", "then", "run", "all", "tests"]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}
TOOLS = {f"tool_{i}": f"Tool {i}. " + " ".join(WORDS * 8) for i in range(12)}
CHATS = 9  # of 200 KB
Json = dict[str, Any]


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def post(server: Server, path: str, body: Json) -> Json:
    data, headers = json.dumps({"model": "m"} | body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=120) as answer:
        found: Json = json.loads(answer.read())
        return found


class ClaudeCode:
    """Sends /v1/messages. The first block of its system prompt differs each time."""

    def __init__(self) -> None:
        self._messages: list[Json] = []
        self._tools = [{"name": name, "description": about, "input_schema": SCHEMA} for name, about in TOOLS.items()]

    def turn(self, server: Server, rng: random.Random, number: int) -> tuple[int, int]:
        """The prompt's tokens, and how many of them were cached."""
        if number % 3 == 1:
            call = {"type": "tool_use", "id": f"t{number}", "name": "tool_1", "input": {"path": f"f{number}.py"}}
            self._messages.append({"role": "assistant", "content": [{"type": "text", "text": "So."}, call]})
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": text(rng, 200)}
            self._messages.append({"role": "user", "content": [result]})
            self._messages.append({"role": "system", "content": text(rng, 20)})
        else:
            mark = {"cache_control": {"type": "ephemeral"}}
            self._messages.append({"role": "user", "content": [{"type": "text", "text": text(rng, 80)} | mark]})
        system = [f"x-anthropic-billing-header: cc_version=2; cch={rng.random()};", "You edit files. " * 60]
        body = {"system": [{"type": "text", "text": part} for part in system], "tools": self._tools, "max_tokens": 24}
        body |= {"messages": self._messages, "tool_choice": {"type": "none"}}
        answer = post(server, "/v1/messages?beta=true", body)
        self._messages.append({"role": "assistant", "content": answer["content"] or "Done."})
        usage = answer["usage"]
        cached = int(usage["cache_read_input_tokens"] or 0)
        return int(usage["input_tokens"]) + cached, cached


class Codex:
    """Sends /v1/responses with the whole history. A developer's message stands between turns."""

    def __init__(self) -> None:
        self._items: list[Json] = [{"type": "message", "role": "developer", "content": "Rules. " * 40}]
        self._tools = [
            {"type": "function", "name": n, "description": d, "parameters": SCHEMA} for n, d in TOOLS.items()
        ]

    def turn(self, server: Server, rng: random.Random, number: int) -> tuple[int, int]:
        if number % 3 == 1:
            call = {"type": "function_call", "call_id": f"c{number}", "name": "tool_2", "arguments": '{"path": "a"}'}
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": text(rng, 200)}
            self._items += [call, output, {"type": "message", "role": "developer", "content": text(rng, 20)}]
        self._items.append({"type": "message", "role": "user", "content": text(rng, 80)})
        body = {"instructions": "You edit files. " * 60, "input": self._items, "tools": self._tools, "store": False}
        body |= {"max_output_tokens": 24, "tool_choice": "none", "include": ["reasoning.encrypted_content"]}
        answer = post(server, "/v1/responses", body)
        self._items += [{k: v for k, v in item.items() if k not in ("id", "status")} for item in answer["output"]]
        usage = answer["usage"]
        return int(usage["input_tokens"]), int(usage["input_tokens_details"]["cached_tokens"])


def turns(server: Server, make: Callable[[], ClaudeCode | Codex], count: int) -> Row:
    agent, rng, shares, before = make(), random.Random(make.__name__), [], 0
    for number in range(count):
        num_prompt, cached = agent.turn(server, rng, number)
        if before:
            shares.append(cached / (before // BLOCK * BLOCK))
        before = num_prompt
    said = f"least {min(shares):.3f}, median {statistics.median(shares):.3f} (the last prompt: {before:,} tokens)"
    return f"{count} turns of {make.__name__}: cached tokens, to full blocks of the turn before", said, "0.98 (aim 1)"


def conversation(server: Server, kilobytes: int) -> Row:
    rng, messages = random.Random(1), list[Json]()
    while sum(len(message["content"]) for message in messages) < 1000 * kilobytes:
        role = "assistant" if len(messages) % 2 else "user"
        messages.append({"role": role, "content": text(rng, 700)})
    costs: list[tuple[float, float]] = []
    for i in range(CHATS + 2):  # the first ones start a process for large bodies, and fill caches
        before = cpu(server)
        body = {"messages": [*messages[: len(messages) // 2 * 2], {"role": "user", "content": f"And {i}?"}]}
        post(server, "/v1/chat/completions", body | {"max_tokens": 1})
        after = cpu(server)
        costs.append((after[0] - before[0], after[1] - before[1]))
    gateway, tokenizers = (1000 * statistics.median(cost[k] for cost in costs[2:]) for k in range(2))
    said = f"{gateway:.1f} and {tokenizers:.1f} ms"
    return (
        f"a chat of {kilobytes} KB: CPU of the gateway with its body process; of the tokenizers",
        said,
        "0.75 of before",
    )


def cpu(server: Server) -> tuple[float, float]:
    """Seconds of the gateway, and of the tokenizers, each with the processes that they have started."""
    found = {"api_gateway": 0.0, "tokenizer": 0.0}
    for pid, title in server.family().items():
        for name in found:
            if name in title:
                threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
                found[name] += sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
    return found["api_gateway"], found["tokenizer"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--kb", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(shapes.write("llama-3.1-8b", Path(folder)))
        mock = (model, "--tokenizer", model, "--served-model-name", "m", "--worker-cls", "mock", "--mock-step-ms", "1")
        parser_flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        with serve(*mock, *parser_flags, "--max-model-len", "120000", "--num-gpu-blocks-override", "30000") as server:
            rows = [turns(server, agent, args.turns) for agent in (ClaudeCode, Codex) if args.turns]
            rows.append(conversation(server, args.kb))
    print(table(rows))


if __name__ == "__main__":
    main()
