"""Answers of chats that formats read: parsed parts beside the whole text, strict tools, formats that raise."""

import asyncio
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
from fake_ring import CARD, FakeRing

from blockyard.services.offline.answers import CompletionToolCall, CustomToolCall, FunctionToolCall
from blockyard.services.offline.batch import OfflineRequest, RequestBatch
from blockyard.services.offline.inflight import InflightLimiter
from blockyard.services.offline.outputs import CompletionOutput
from blockyard.services.offline.prompts import ChatOptions, read_conversations
from blockyard.services.offline.sampling_params import SamplingParams, read
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Cancel, Generate, GrammarKind, ModelSettings, Tokenize, ToolDefaults
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.request_fields.output_format import OutputFormats
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.families import HERMES

DEFAULTS = ToolDefaults(parser="hermes", reasoning_parser="qwen3", reasoning_start="<think>", reasoning_end="</think>")
BOTH = OutputFormats.load(DEFAULTS)
USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "custom", "custom": {"name": "run"}},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
CUSTOM = '<tool_call>\n{"name": "run", "arguments": {"input": "ls"}}\n</tool_call>'
TEXT = f"<think>so</think>Now:{CALL}\n{CUSTOM}"


def batch_of(
    texts: list[str], formats: OutputFormats, tools: Any = TOOLS, params: SamplingParams | None = None
) -> tuple[RequestBatch, FakeRing]:
    """A batch with a conversation for each answer, after it has run."""
    ring = FakeRing()
    ring.script = lambda request_id, index: texts[int(request_id.rpartition("-")[2])][index * 5 : index * 5 + 5]
    asked = params or SamplingParams(max_tokens=max(len(text) for text in texts) // 5 + 1)

    async def run() -> RequestBatch:
        client = RingClient(ring, ["tiny"], 30.0)
        limiter = InflightLimiter(client, "tiny", 30.0)

        def receive(peer: int, event: Any) -> None:
            client.handle(peer, event)
            limiter.send_pending()

        ring.receive = receive
        ring.join_all()
        prompts = read_conversations([USER] * len(texts), ChatOptions(tools=tools, formats=formats), "tiny")
        card = msgspec.structs.replace(CARD, settings=ModelSettings(tools=DEFAULTS))
        requests = [OfflineRequest(p, read(asked, CARD.vocab_size, 20), 1) for p in prompts]
        batch = RequestBatch("b", requests, card, client, limiter)
        async with asyncio.timeout(20):
            await batch.run()
        assert client.journal.entries == {}
        return batch

    return asyncio.run(run()), ring


def first(batch: RequestBatch, index: int = 0) -> CompletionOutput:
    output = batch.outputs[index]
    assert output is not None
    return output.outputs[0]


def test_parts_beside_the_whole_text() -> None:
    batch, ring = batch_of([TEXT, "plain"], BOTH)
    one, plain = first(batch), first(batch, 1)
    assert (one.text, one.content, one.reasoning) == (TEXT, "Now:", "so")
    function, custom = one.tool_calls
    assert function == CompletionToolCall(function.id, "function", FunctionToolCall("f", '{"a": [1]}'))
    assert custom == CompletionToolCall(custom.id, "custom", custom=CustomToolCall("run", "ls"))
    assert len({function.id, custom.id}) == 2 and function.id.startswith("call_")
    assert asdict(function)["function"] == {"name": "f", "arguments": '{"a": [1]}'}
    assert (plain.content, plain.reasoning, plain.tool_calls) == ("plain", None, [])
    (frame, _), (work, _) = ring.frames(Generate), ring.frames(Tokenize)
    assert isinstance(frame, Generate) and isinstance(work, Tokenize)
    assert set(frame.text.shown_special) == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert work.reasoning_markers == ["<think>", "</think>"]


def test_without_parsers_all_text_is_content() -> None:
    batch, ring = batch_of([TEXT], OutputFormats())
    one = first(batch)
    assert (one.text, one.content, one.reasoning, one.tool_calls) == (TEXT, TEXT, None, [])
    (frame,) = ring.frames(Generate)
    assert isinstance(frame, Generate) and frame.text.shown_special == []


def test_ids_alone_are_not_read() -> None:
    batch, _ = batch_of([TEXT], BOTH, params=SamplingParams(detokenize=False, max_tokens=30))
    one = first(batch)
    assert (one.text, one.content, one.tool_calls) == ("", "", [])


def test_calls_of_strict_tools_have_a_grammar() -> None:
    strict = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}]
    _, ring = batch_of(["plain"], BOTH, strict)
    (work,) = ring.frames(Tokenize)
    assert isinstance(work, Tokenize) and work.grammar is not None and work.grammar.kind == GrammarKind.LARK
    assert (work.reasoning_start, work.reasoning_end) == ("<think>", "</think>")
    _, ring = batch_of(["plain"], BOTH, TOOLS)
    (work,) = ring.frames(Tokenize)
    assert isinstance(work, Tokenize) and (work.grammar, work.reasoning_end) == (None, "")


def test_a_format_that_raises_fails_its_prompt_alone() -> None:
    def frail(text: Any, tools: Any) -> Any:
        if (yield from text.peek(9)).startswith("<bad>"):
            raise KeyError("oh")
        yield from HERMES.read(text, tools)

    formats = OutputFormats(ToolFormat("frail", "none", frail, HERMES.write_grammar))
    batch, ring = batch_of([CALL, "<bad> and more", "fine"], formats)
    assert [call.function for call in first(batch).tool_calls] == [FunctionToolCall("f", '{"a": [1]}')]
    assert batch.outputs[1] is None and first(batch, 2).content == "fine"
    assert set(batch.failures) == {1}
    error = batch.failures[1]
    assert isinstance(error, RequestError) and error.code == "output_parser_failed"
    assert str(error) == "--tool-call-parser frail failed at this answer: KeyError: 'oh'"
    assert [frame.request_id for frame in ring.frames(Cancel) if isinstance(frame, Cancel)] == ["b-1"]


@pytest.mark.parametrize("text", ["<bad> at the end"])
def test_a_format_that_raises_at_the_last_token(text: str) -> None:
    def frail(given: Any, tools: Any) -> Any:
        yield from given.peek(len(text))
        raise ValueError("no")

    batch, _ = batch_of(
        [text, "fine, and it is longer"], OutputFormats(ToolFormat("frail", "", frail, HERMES.write_grammar))
    )
    assert set(batch.failures) == {0, 1}
