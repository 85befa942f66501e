"""--stream-interval: fewer events, with the same text, ids and log-probabilities."""

from typing import Any

import msgspec
import pytest

from blockyard.services.api_gateway.responses.event_stream import EventStream
from blockyard.services.api_gateway.responses.stream_interval import PacedStream
from blockyard.shared.messages import FinishReason, ModelSettings, TextDelta, ToolDefaults

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


class Collected:
    def __init__(self) -> None:
        self.deltas: list[TextDelta] = []

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        self.deltas.append(delta)


def deltas(*sizes: int) -> list[TextDelta]:
    made, first = [], 0
    for size in sizes:
        ids = list(range(first, first + size))
        made.append(TextDelta("r", 0, 0, first, ids, "".join(f"t{i} " for i in ids)))
        first += size
    return made


@pytest.mark.parametrize(
    ("interval", "sizes", "passed"),
    [
        (4, [1] * 10, [1, 4, 4, 1]),
        (4, [3, 3, 3, 3], [3, 6, 3]),
        (100, [1] * 5, [1, 4]),
        (2, [5, 5], [5, 5]),
    ],
)
def test_the_first_token_and_the_end_are_not_kept(interval: int, sizes: list[int], passed: list[int]) -> None:
    sink, made = Collected(), deltas(*sizes)
    stream = PacedStream(sink, interval)
    made[-1] = msgspec.structs.replace(made[-1], finish=FinishReason.STOP)
    for delta in made:
        stream.push(delta, 0.0, 0.0)
    assert [len(d.token_ids) for d in sink.deltas] == passed
    assert "".join(d.text for d in sink.deltas) == "".join(d.text for d in made)
    assert [d.finish for d in sink.deltas][-1] == FinishReason.STOP
    for before, after in zip(sink.deltas, sink.deltas[1:], strict=False):
        assert after.first == before.first + len(before.token_ids)


def texts(events: list[Any]) -> list[str]:
    return [e["choices"][0]["delta"].get("content") for e in events[:-1] if e["choices"]]


async def test_events_of_a_stream_have_so_many_tokens(rig) -> None:
    fields = {"stream_options": {"include_usage": True}, "logprobs": True, "return_token_ids": True}
    async with rig(stream_interval=4) as r:
        plain, rich = [await r.events("/v1/chat/completions", CHAT | more) for more in ({}, fields)]
    expected = ["w0 ", "w1 w2 w3 w4 ", "w5 w6 w7 w8 ", "w9 "]
    assert [text for text in texts(plain) if text] == [text for text in texts(rich) if text] == expected
    chosen = [e["choices"][0] for e in rich[:-2]]
    assert [len(c["logprobs"]["content"]) for c in chosen if c["logprobs"]] == [1, 4, 4, 1]
    assert [i for c in chosen for i in c["token_ids"] or []] != []
    assert rich[-2]["usage"]["completion_tokens"] == 10


async def test_parsed_calls_are_the_same_in_larger_pieces(rig) -> None:
    answer = '<tool_call>{"name": "look", "arguments": {"at": "the sea and the sky"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    settings = {"tools": ToolDefaults(auto_choice=True, parser="hermes")}
    assert set(settings) <= set(ModelSettings.__struct_fields__)
    arguments = {}
    for interval in (1, 7):
        async with rig(stream_interval=interval, **settings) as r:
            r.ring.script = lambda _, index: answer[index : index + 1]
            body = CHAT | {"tools": tools, "max_tokens": len(answer)}
            events = await r.events("/v1/chat/completions", body)
        calls = [call for e in events[:-1] for call in e["choices"][0]["delta"].get("tool_calls") or []]
        arguments[interval] = "".join(call["function"].get("arguments") or "" for call in calls)
    assert arguments[1] == arguments[7] == '{"at": "the sea and the sky"}'


async def test_without_the_flag_nothing_stands_between_the_journal_and_the_stream(rig) -> None:
    for interval, kind in ((1, EventStream), (2, PacedStream)):
        async with rig(stream_interval=interval) as r:
            r.ring.step_s = 0.05
            async with r.http.post("/v1/chat/completions", json=CHAT | {"stream": True}) as response:
                (entry,) = r.gateway.journal.entries.values()
                assert type(entry.choices[0].sink) is kind
                await response.read()
