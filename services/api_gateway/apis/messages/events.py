"""Answers of /v1/messages: blocks of thinking, text and tool use, streamed or whole."""

from collections.abc import Callable, Sequence

import msgspec

from blockyard.services.api_gateway.apis.hidden_reasoning import hide_reasoning
from blockyard.services.api_gateway.apis.interface import PLAIN, EventFields, FinishedChoice, Usage
from blockyard.services.api_gateway.apis.messages.errors import error_body
from blockyard.services.api_gateway.apis.messages.partial_json import complete_object
from blockyard.services.api_gateway.requests.generate_request import MessagesOptions, ResponseOptions
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason
from blockyard.shared.output_parsing.parts import Part, PartKind

encode = msgspec.json.Encoder().encode
SHOWN = "blockyard"  # signature of thinking that the block itself has

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
# the delta of each kind of part
DELTAS = {
    PartKind.CONTENT: (b"text_delta", b"text"),
    PartKind.REASONING: (b"thinking_delta", b"thinking"),
    PartKind.ARGUMENTS: (b"input_json_delta", b"partial_json"),
}


class ThinkingTokens(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """`input_tokens` counts the prompt's tokens that were not found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None = None
    output_tokens_details: ThinkingTokens | None = None


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    role: str
    model: str
    content: Sequence[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


def message_usage(usage: Usage) -> MessageUsage:
    cached = usage.cached or 0
    thinking = None if usage.reasoning is None else ThinkingTokens(usage.reasoning)
    return MessageUsage(usage.prompt - cached, usage.completion, cached, thinking)


class MessageEvents:
    """Writes one streamed answer, which has one choice. One block is open at a time."""

    same_around_text = None

    def __init__(self, options: ResponseOptions) -> None:
        assert options.messages is not None
        self._options, self._own = options, options.messages
        self._num_blocks = 0
        self._open: PartKind | None = None  # kind of the parts that the open block takes
        self._head = self._tail = b""  # around the text of its deltas
        self._around_text: tuple[bytes, bytes] | None = None  # the same, while the open block is text
        self._hidden: list[str] = []  # thinking that is not shown
        self._calls = _CallCount()
        self._finish = FinishReason.STOP
        self._stop_reason: int | str | None = None

    def choice(self, index: int, prompt_ids: list[int] | None, prompt_text: str | None = None) -> "MessageEvents":
        return self

    def around_text(self, text: str, stamp_s: float | None) -> tuple[bytes, bytes] | None:
        return self._around_text

    def opening(self, usage: Usage | None) -> bytes:
        options = self._options
        shown = message_usage(Usage(0, 0) if usage is None else usage)
        message = MessageAnswer(options.answer_id, options.role, options.model, [], None, None, shown)
        return _event(b"message_start", b'"message":%b' % encode(message))

    def event(self, part: Part | None, fields: EventFields) -> bytes:
        if part is not None and part.kind is self._open and fields is PLAIN and part.text:  # nearly every token
            return self._delta(part.text)
        data = b"" if part is None else self._part(part)
        if fields.finish is not None:
            data += self._close()
            self._finish, self._stop_reason = fields.finish, fields.stop_reason
        return data

    def ending(self, usage: Callable[[], Usage]) -> bytes:
        used = usage()
        reason, sequence = _stop(self._own, self._finish, self._stop_reason, self._calls.has_whole, used)
        delta = b'"delta":{"stop_reason":%b,"stop_sequence":%b}' % (encode(reason), encode(sequence))
        return _event(b"message_delta", b'%b,"usage":%b' % (delta, encode(message_usage(used)))) + STOP

    def failed(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _part(self, part: Part) -> bytes:
        self._calls.add(part.kind)
        match part.kind:
            case PartKind.CALL:
                block = ToolUseBlock(part.call_id, part.text, msgspec.Raw(b"{}"))
                return self._begin(block, PartKind.ARGUMENTS)
            case PartKind.CALL_END:
                return self._close()
        if not part.text:
            return b""
        begun = b""
        if part.kind is not self._open:
            begun = self._begin(TextBlock("") if part.kind is PartKind.CONTENT else ThinkingBlock("", ""), part.kind)
        return begun + self._delta(part.text)

    def _delta(self, text: str) -> bytes:
        if self._open is PartKind.REASONING and not self._own.shows_thinking:
            self._hidden.append(text)
            return b""
        return self._head + encode(text) + self._tail

    def _begin(self, block: AnswerBlock, takes: PartKind) -> bytes:
        before = self._close()
        index, self._num_blocks, self._open = self._num_blocks, self._num_blocks + 1, takes
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._head, self._tail = head % (index, *DELTAS[takes]), b"}}\n\n"
        self._around_text = (self._head, self._tail) if takes is PartKind.CONTENT else None
        return before + _event(b"content_block_start", b'"index":%d,"content_block":%b' % (index, encode(block)))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        index, was, self._open, self._around_text = self._num_blocks - 1, self._open, None, None
        end = _event(b"content_block_stop", b'"index":%d' % index)
        if was is not PartKind.REASONING:
            return end
        delta = b'{"type":"signature_delta","signature":%b}' % encode(_signature(self._own, "".join(self._hidden)))
        self._hidden = []
        return _event(b"content_block_delta", b'"index":%d,"delta":%b' % (index, delta)) + end


class _CallCount:
    """Whether an answer ended with whole calls."""

    def __init__(self) -> None:
        self.has_whole = False  # there are calls, and the last one is whole

    def add(self, kind: PartKind) -> None:
        if kind in (PartKind.CALL, PartKind.CALL_END):
            self.has_whole = kind is PartKind.CALL_END


def whole_answer(options: ResponseOptions, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    assert options.messages is not None
    [choice] = choices
    calls = _CallCount()
    for part in choice.parts:
        calls.add(part.kind)
    reason, sequence = _stop(options.messages, choice.finish, choice.stop_reason, calls.has_whole, usage)
    blocks, shown = _blocks(options.messages, choice.parts), message_usage(usage)
    return encode(MessageAnswer(options.answer_id, options.role, options.model, blocks, reason, sequence, shown))


def _blocks(own: MessagesOptions, parts: Sequence[Part]) -> list[AnswerBlock]:
    """Parts of one kind that follow each other are one block."""
    grouped: list[tuple[Part, list[str]]] = []  # the first part of each block, and the texts that it has
    takes: PartKind | None = None
    for part in parts:
        if part.kind is PartKind.CALL:
            grouped.append((part, []))
            takes = PartKind.ARGUMENTS
        elif part.kind is PartKind.CALL_END:
            takes = None
        elif part.text:
            if part.kind is not takes:
                grouped.append((part, []))
                takes = part.kind
            grouped[-1][1].append(part.text)
    return [_block(own, first, "".join(texts)) for first, texts in grouped]


def _block(own: MessagesOptions, first: Part, text: str) -> AnswerBlock:
    if first.kind is PartKind.CALL:
        return ToolUseBlock(first.call_id, first.text, complete_object(text))
    if first.kind is PartKind.REASONING:
        return ThinkingBlock(text if own.shows_thinking else "", _signature(own, text))
    return TextBlock(text)


def _signature(own: MessagesOptions, thinking: str) -> str:
    return SHOWN if own.shows_thinking else hide_reasoning(thinking)


def _stop(
    own: MessagesOptions, finish: FinishReason, stop_reason: int | str | None, has_calls: bool, usage: Usage
) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`. `has_calls`: the answer has calls, and the last one is whole."""
    if finish != FinishReason.STOP:
        is_full = usage.completion < own.max_tokens and usage.prompt + usage.completion >= own.max_model_len
        return "model_context_window_exceeded" if is_full else "max_tokens", None
    if has_calls:
        return "tool_use", None
    return ("stop_sequence", stop_reason) if isinstance(stop_reason, str) else ("end_turn", None)


def _event(name: bytes, fields: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (name, name, fields)
