"""One gateway process alone: events a second of its CPU, 256 streams, one event a token; and whole answers a second.

Answers are plain text, or text that a reader of tool calls, or of reasoning and tool calls, makes into parts. The ring
behind the gateway is one process that plays tokenizer, scheduler and detokenizer over real links and sends one batch a
step at a set pace; clients are raw sockets in this process. The gateway cannot tell the difference.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1]))  # for rig
sys.path.append(str(Path(__file__).parents[2] / "support"))

from fake_ring import CARD, tokenized
from rig import ROOT, Row, cpu_seconds, rss_mib, table
from tcp_addresses import free_port

from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.registry import RegistryConfig
from blockyard.shared.messages import (
    Accepted,
    Cancel,
    DetokenizerIn,
    FinishReason,
    Generate,
    ModelSettings,
    QueueCapacity,
    Role,
    SchedulerIn,
    TextBatch,
    TextDelta,
    Tokenize,
    TokenizerIn,
    ToolDefaults,
)
from blockyard.shared.process.settings import die_with

STREAMS, TOKENS = 256, 400
FASTEST = 80_000.0  # events a second that are offered: more are queued
PATIENCE_S = 40.0  # of all clients together
WORDS = [f" word{i % 97}" for i in range(TOKENS)]


@dataclass(frozen=True)
class Load:
    """What is asked and answered, one token each text, and how the gateway reads it."""

    name: str
    bar: str
    path: str
    body: dict[str, Any]
    words: list[str]
    tools: ToolDefaults
    middleware: tuple[str, ...] = ()
    rounds: int = 1  # requests of each client, one after the other

    @property
    def is_whole(self) -> bool:
        """Answers are not streamed: requests are counted, and not events."""
        return not self.body["stream"]


def _call(count: int) -> list[str]:
    """A call of about `count` tokens."""
    start = ["<tool_call>", "\n", '{"name":', ' "search",', ' "arguments":', ' {"query":', ' "']
    return [*start, *WORDS[: count - 10], '"}}', "\n", "</tool_call>"]


def whole_answers() -> list[Load]:
    """Answers of 32 tokens. Those of responses are stored, as usual."""
    fields: dict[str, Any] = {"stream": False, "ignore_eos": True}
    messages = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 200}
    asked = {"input": "hello there", "max_output_tokens": 200}
    no_tools, words, rounds = ToolDefaults(), WORDS[:32], 10
    return [
        Load("whole chats", "none", "/v1/chat/completions", fields | messages, words, no_tools, rounds=rounds),
        Load("whole messages", "0.85 of chats", "/v1/messages", fields | messages, words, no_tools, rounds=rounds),
        Load("whole responses", "0.8 of chats", "/v1/responses", fields | asked, words, no_tools, rounds=rounds),
    ]


def loads() -> list[Load]:
    fields: dict[str, Any] = {"max_tokens": 200, "stream": True, "ignore_eos": True}
    tool = {"type": "function", "function": {"name": "search"}}
    chat = fields | {"messages": [{"role": "user", "content": "hello there"}], "tools": [tool]}
    part = TOKENS // 4
    calls = ToolDefaults(auto_choice=True, parser="hermes")
    message = {"max_tokens": 200, "stream": True, "ignore_eos": True, "messages": chat["messages"]}
    tools = [{"name": "search", "input_schema": {"type": "object"}}]
    response = {"max_output_tokens": 200, "stream": True, "ignore_eos": True, "input": "hello there"}
    no_tools = ToolDefaults()
    both = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
    thought = ["<think>", *WORDS[: part - 2], "</think>"]
    return [
        Load("plain", "100,000", "/v1/completions", fields | {"prompt": "hello there"}, WORDS, ToolDefaults()),
        Load("a reader of calls", "45,000", "/v1/chat/completions", chat, WORDS[: 2 * part] + _call(2 * part), calls),
        Load(
            "a reader of reasoning and calls",
            "40,000",
            "/v1/chat/completions",
            chat,
            thought + WORDS[:part] + _call(2 * part),
            both,
        ),
        Load("plain chat", "none", "/v1/chat/completions", chat | {"tools": None}, WORDS, no_tools),
        Load(
            "plain, one ASGI class",
            "0.4 of plain",
            "/v1/completions",
            fields | {"prompt": "hello there"},
            WORDS,
            no_tools,
            ("user_middlewares.First",),
        ),
        Load("plain messages", "0.85 of chat", "/v1/messages", message, WORDS, no_tools),
        Load("plain responses", "0.75 of chat", "/v1/responses", response, WORDS, no_tools),
        Load("arguments of a call, chat", "none", "/v1/chat/completions", chat, _call(TOKENS), calls),
        Load(
            "arguments of a call, messages",
            "0.75 of chat",
            "/v1/messages",
            message | {"tools": tools},
            _call(TOKENS),
            calls,
        ),
        Load(
            "arguments of a call, responses",
            "0.75 of chat",
            "/v1/responses",
            response | {"tools": [{"type": "function", "name": "search"}]},
            _call(TOKENS),
            calls,
        ),
        *whole_answers(),
    ]


def bus(folder: str) -> BusConfig:
    return BusConfig(registry=f"ipc://{folder}/message-bus", bind=f"ipc://{folder}")


class Ring:
    """Plays all other roles in one thread. `pace` is in events a second."""

    def __init__(self, folder: str, pace: float, load: Load) -> None:
        self.words = load.words
        self.tokenizer: Links[TokenizerIn] = Links("tokenizer_pool", Role.TOKENIZER_POOL, bus(folder), TokenizerIn)
        self.scheduler: Links[SchedulerIn] = Links("scheduler", Role.SCHEDULER, bus(folder), SchedulerIn)
        self.detokenizer: Links[DetokenizerIn] = Links("detokenizer", Role.DETOKENIZER, bus(folder), DetokenizerIn)
        self.step_s = STREAMS / pace
        self.attempts: dict[str, int] = {}  # of requests that wait for the others
        self.gateway = 0
        self.scheduler.update(card=msgspec.structs.replace(CARD, settings=ModelSettings(tools=load.tools)))
        for links in (self.tokenizer, self.scheduler, self.detokenizer):
            links.update(ready=True)

    def run(self) -> None:
        while True:
            self.turn(0.001)
            if len(self.attempts) == STREAMS:
                self.play()

    def turn(self, timeout_s: float) -> None:
        """Answers all frames that have arrived. Called within an answer too: its first clients may go on already."""
        for peer, text in self.tokenizer.poll(timeout_s):
            if isinstance(text, Tokenize):
                self.tokenizer.answer(peer, tokenized(text))
        for peer, frame in self.scheduler.poll(timeout_s):
            match frame:
                case Generate(request_id=request_id, attempt=attempt):
                    capacity = QueueCapacity(9999, 10**9)
                    self.scheduler.answer(
                        peer, Accepted(request_id, attempt, self.detokenizer.me.incarnation, capacity)
                    )
                    self.attempts[request_id] = attempt
                    self.gateway = peer
                case Cancel(request_id=request_id):
                    self.attempts.pop(request_id, None)
        self.detokenizer.poll(0.0)

    def play(self) -> None:
        time.sleep(0.3)  # all clients have their headers
        attempts, self.attempts = self.attempts, {}
        due = time.perf_counter()
        for i, word in enumerate(self.words):
            finish = FinishReason.LENGTH if i == len(self.words) - 1 else None
            deltas = [TextDelta(r, attempt, 0, i, [i], word, finish) for r, attempt in attempts.items()]
            if not self.detokenizer.send(self.gateway, TextBatch(deltas, time.time())):
                raise RuntimeError(f"the gateway is gone, or its link is full, at token {i}")
            self.turn(0.0)
            due += self.step_s
            time.sleep(max(0.0, due - time.perf_counter()))


async def client(load: Load, port: int) -> int:
    """Answers over a raw socket: the number of events, or of whole answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = msgspec.json.encode(load.body)
    head = f"POST {load.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    events = 0
    for _ in range(load.rounds if load.is_whole else 0):
        writer.write(head.encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert answered.startswith(b"http/1.1 200"), answered
        await reader.readexactly(int(answered.partition(b"content-length:")[2].partition(b"\r")[0]))
        events += 1
    if load.is_whole:
        writer.close()
        return events
    writer.write(head.encode() + body)
    while data := await reader.read(1 << 16):
        events += data.count(b"data: {")
        if data.endswith(b"0\r\n\r\n"):
            break
    writer.close()
    return events


async def clients(load: Load, port: int) -> int:
    async with asyncio.timeout(PATIENCE_S):  # a ring that has lost a request waits for it
        return sum(await asyncio.gather(*(client(load, port) for _ in range(STREAMS))))


def spawn(folder: str, service: str, config: msgspec.Struct) -> subprocess.Popen[bytes]:
    path = Path(folder) / f"{service}.json"
    path.write_bytes(msgspec.json.encode(config))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), str(ROOT / "tests" / "support")])}
    return subprocess.Popen([sys.executable, "-m", f"blockyard.services.{service}", str(path)], env=env)


def measure(load: Load, pace: float) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        # A gateway of a killed run must not get clients of this one: gateways share a port. So each run has its own
        # port, and its processes end with this one.
        port = free_port()
        process = ProcessConfig(name="bench", bus=bus(folder), log_level="warning", parent_pid=os.getpid())
        registry = spawn(folder, "message_bus", RegistryConfig(process=process))
        ring = subprocess.Popen([sys.executable, __file__, "ring", folder, str(pace), load.name])
        config = GatewayConfig(process=process, host="127.0.0.1", port=port, middleware=list(load.middleware))
        gateway = spawn(folder, "api_gateway", config)
        try:
            wait_ready(port)
            idle = rss_mib(gateway.pid)
            asyncio.run(clients(load, port))
            before, start = cpu_seconds(gateway.pid), time.perf_counter()
            events = asyncio.run(clients(load, port))
            cpu, wall = cpu_seconds(gateway.pid) - before, time.perf_counter() - start
            loaded = rss_mib(gateway.pid)
        finally:
            for child in (gateway, ring, registry):
                child.send_signal(signal.SIGTERM)
            for child in (gateway, ring, registry):
                child.wait()
    kind = "answers" if load.is_whole else "events"
    text = (
        f"{events / cpu:,.0f} {kind}/s ({events:,} {kind}, {cpu:.2f} s of CPU in {wall:.1f} s; "
        f"{idle:.0f} MiB idle, {loaded:.0f} after)"
    )
    what = f"{STREAMS} at a time, 32 tokens" if load.is_whole else f"{STREAMS} streams, one event a token"
    name = f"gateway alone, {load.name}, {what}, {pace:,.0f} tokens a second offered"
    return (name, text, load.bar)


def wait_ready(port: int) -> None:
    import urllib.error
    import urllib.request

    for _ in range(400):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models/tiny", timeout=1):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise RuntimeError("the gateway was not ready in time")


def main() -> list[Row]:
    plain, *readers = loads()
    rows = [measure(plain, pace) for pace in (12_800.0, 40_000.0, FASTEST)]
    return rows + [measure(load, FASTEST / 2) for load in readers]


if __name__ == "__main__":
    if sys.argv[1:2] == ["only"]:  # loads by name, and events a second that are offered
        paces = [float(word) for word in sys.argv[2:] if word.isdecimal()] or [FASTEST / 2]
        print(table([measure(load, pace) for pace in paces for load in loads() if load.name in sys.argv[2:]]))
    elif sys.argv[1:2] == ["ring"]:
        die_with(os.getppid())
        [chosen] = [load for load in loads() if load.name == sys.argv[4]]
        Ring(sys.argv[2], float(sys.argv[3]), chosen).run()
    else:
        print(table(main()))
