"""What a gateway computes for each streamed event: without a reader, with readers, and in a call of 30,000 tokens.

One stream in this process, whose client reads everything at once: no socket, no ring.
"""

import time
from collections.abc import Sequence

from rig import Row, table

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.apis.interface import Usage
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.services.api_gateway.responses.event_stream import EventStream
from blockyard.services.api_gateway.responses.response_writer import ResponseWriter, UnreadText
from blockyard.shared.messages import TextDelta, ToolDefaults
from blockyard.shared.ring_client.choice_reader import ChoiceReader
from blockyard.shared.ring_client.request_fields.output_format import (
    CallForm,
    OutputForm,
    OutputFormats,
    ReasoningMeter,
    answer_format,
)
from blockyard.shared.ring_client.request_fields.tools import ToolMode, ToolUse
from blockyard.shared.tool_parsers.interface import CallId
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

TOKENS, REPEATS = 30_000, 7
WORDS = [f" word{i % 97}" for i in range(TOKENS)]
USE = ToolUse(ToolMode.AUTO, [Tool(ToolKind.FUNCTION, "search", {"properties": {"query": {"type": "string"}}})], b"")
BEGUN = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {"query": "',
    "mistral": '[TOOL_CALLS][{"name": "search", "arguments": {"query": "',
    "llama3_json": '{"name": "search", "parameters": {"query": "',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
    '{"query": "',
    "internlm": '<|action_start|><|plugin|>\n{"name": "search", "parameters": {"query": "',
    "qwen3_coder": "<tool_call>\n<function=search>\n<parameter=query>\n",
    "glm45": "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">',
    "pythonic": '[search(query="',
    "olmo3": '<function_calls>\nsearch(query="',
    "openai": '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "',
}


class Transport:
    """A client that has read everything."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


def stream(parser: str, reasoning: str) -> EventStream:
    writer, reader = ResponseWriter(UnreadText(1 << 30)), None
    if parser or reasoning:
        formats, meter = OutputFormats.load(ToolDefaults(parser=parser, reasoning_parser=reasoning)), ReasoningMeter()
        form = OutputForm(CallForm.FAMILY if parser else CallForm.NONE, bool(reasoning))
        read = answer_format(form, USE, formats, None, meter)
        reader = ChoiceReader(read, meter, CallId.OPENAI, True, print)
    options = ResponseOptions("chatcmpl-0", 1, "tiny", has_reader=reader is not None)
    made = EventStream(options, CHAT.events(options).choice(0, None), writer, lambda: Usage(0, 0), reader)
    writer.start(Transport(), True, 0.0)  # type: ignore[arg-type]
    return made


def seconds(words: Sequence[str], parser: str = "", reasoning: str = "", begun: str = "") -> list[float]:
    """CPU time of each thousand of the tokens, the least of several runs."""
    best = [float("inf")] * (len(words) // 1000)
    deltas = [TextDelta("r", 0, 0, i, [i], word) for i, word in enumerate(words)]
    for _ in range(REPEATS):
        made = stream(parser, reasoning)
        made.push(TextDelta("r", 0, 0, 0, [0], begun), 0.0, 0.0)
        for at in range(len(best)):
            start = time.process_time()
            for delta in deltas[1000 * at : 1000 * at + 1000]:
                made.push(delta, 0.0, 0.0)
            best[at] = min(best[at], time.process_time() - start)
    return best


def per_event(name: str, parser: str = "", reasoning: str = "", begun: str = "") -> Row:
    spent = seconds(WORDS[:10_000], parser, reasoning, begun)
    return (f"an event of {name}", f"{sum(spent) / len(spent) * 1000:.2f} µs", "")


def main() -> list[Row]:
    rows = [
        per_event("plain text"),
        per_event("text, with a reader of calls", "hermes"),
        per_event("text, with a reader of reasoning and calls", "hermes", "qwen3"),
        per_event("reasoning, with both", "hermes", "qwen3", "<think>"),
        per_event("arguments, with both", "hermes", "qwen3", BEGUN["hermes"]),
    ]
    for parser, begun in BEGUN.items():
        spent = seconds(WORDS, parser, "", begun)
        name = f"{parser}: a token of arguments in the last of 30 thousand, against one in the first"
        rows.append((name, f"{spent[-1] / spent[0]:.2f} ({spent[0] * 1000:.2f} µs)", "1.20"))
    return rows


if __name__ == "__main__":
    print(table(main()))
