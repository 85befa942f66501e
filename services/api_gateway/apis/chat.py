"""Answers of /v1/chat/completions: a message with content, reasoning and tool calls."""

from collections.abc import Sequence

import msgspec

from blockyard.services.api_gateway.apis.interface import (
    PLAIN,
    Api,
    EventFields,
    FinishedChoice,
    Usage,
)
from blockyard.services.api_gateway.apis.logprobs import ChatLogprobs, chat_logprobs
from blockyard.services.api_gateway.apis.openai_fields import (
    FINISH_REASONS,
    NULL,
    NULL_VALUE,
    OpenAIEvents,
    PromptLogprobs,
    UsageInfo,
    close_event,
    encode,
    error_body,
    event_head,
    raw_object,
    server_fields,
    shown_prompt_logprobs,
    usage_field,
    usage_info,
)
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.services.api_gateway.requests.schemas import ChatRequest
from blockyard.services.api_gateway.requests.validate import parse_chat
from blockyard.shared.messages import FinishReason
from blockyard.shared.output_parsing.parts import Part, PartKind

KIND, EVENT_KIND = "chat.completion", "chat.completion.chunk"


class NamedArguments(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class CustomInput(msgspec.Struct, frozen=True):
    name: str
    input: str


class FunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    id: str
    function: NamedArguments


class CustomCall(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    id: str
    custom: CustomInput


class AnswerMessage(msgspec.Struct, frozen=True):
    """With the empty fields that clients read in every message."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: NamedArguments | None = None
    tool_calls: list[FunctionCall | CustomCall] = []
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatAnswer(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    service_tier: str | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: msgspec.Raw = NULL_VALUE


class ChatEvents:
    """The events of one choice. A call begins with an event of its name; its arguments follow as they come."""

    def __init__(
        self, options: ResponseOptions, index: int, prompt_ids: list[int] | None, prompt_text: str | None
    ) -> None:
        self._options, self._index, self._prompt_ids, self._prompt_text = options, index, prompt_ids, prompt_text
        self._num_calls = 0
        self._is_open = False  # the call that was begun last has not ended
        self._call_head = self._call_tail = b""  # around arguments of the call that was begun last, in a delta
        self._arguments_head = self._arguments_tail = b""  # the same, in an event without other fields
        self._head = b'%b,"choices":[{"index":%d,"delta":' % (event_head(options, EVENT_KIND), index)
        tail = self._tail_of(PLAIN)
        self._plain_tail = tail + close_event(None)
        self._text_head, self._text_tail = self._head + b'{"content":', b"}" + tail
        self.same_around_text = self._text_head, self._text_tail + close_event(None)

    def around_text(self, text: str, stamp_s: float | None) -> tuple[bytes, bytes]:
        if stamp_s is None:
            return self.same_around_text
        return self._text_head, self._text_tail + close_event(stamp_s)

    def opening(self, usage: Usage | None) -> bytes:
        """The role, and a message that is repeated. The event of choice 0 also has the prompt's ids and text."""
        content = NULL if self._options.has_reader else b'""'
        delta = b'{"role":%b,"content":%b}' % (encode(self._options.role), content)
        prompt = NULL
        if self._index == 0:
            prompt = encode(self._prompt_ids)
            if self._prompt_text is not None:
                prompt += b',"prompt_text":' + encode(self._prompt_text)
        event = self._head + delta + self._tail_of(EventFields(usage=usage), prompt) + close_event(None)
        if not self._options.echo_message:
            return event
        return event + self._text_head + encode(self._options.echo_message) + self.same_around_text[1]

    def event(self, part: Part | None, fields: EventFields) -> bytes:
        if part is not None:
            if part.kind is PartKind.ARGUMENTS and fields is PLAIN:  # nearly every token of a call
                return self._arguments_head + encode(part.text) + self._arguments_tail
            if part.kind is PartKind.CALL_END:
                self._is_open = False
                return b""
        delta = b"{}" if part is None else self._delta(part)
        if fields is PLAIN:
            return self._head + delta + self._plain_tail
        return self._head + delta + self._tail_of(fields) + close_event(fields.stamp_s)

    def _delta(self, part: Part) -> bytes:
        text = encode(part.text)
        match part.kind:
            case PartKind.CONTENT:
                return b'{"content":%b}' % text
            case PartKind.ARGUMENTS:
                return self._call_head + text + self._call_tail
            case PartKind.REASONING:
                return b'{"reasoning":%b,"reasoning_content":%b}' % (text, text)
            case PartKind.CALL:
                return self._begun(part)
            case PartKind.CALL_END:
                return b"{}"

    def _begun(self, part: Part) -> bytes:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._is_open = True
        name = encode(part.text)
        if self._options.function_call:
            self._set_call(b'{"function_call":{"arguments":', b"}}")
            return b'{"function_call":{"name":%b,"arguments":""}}' % name
        kind, key = (b"custom", b"input") if part.text in self._options.custom_tools else (b"function", b"arguments")
        self._set_call(b'{"tool_calls":[{"index":%d,"%b":{"%b":' % (index, kind, key), b"}}]}")
        form = b'{"tool_calls":[{"index":%d,"id":%b,"type":"%b","%b":{"name":%b,"%b":""}}]}'
        return form % (index, encode(part.call_id), kind, kind, name, key)

    def _set_call(self, head: bytes, tail: bytes) -> None:
        self._call_head, self._call_tail = head, tail
        self._arguments_head, self._arguments_tail = self._head + head, tail + self._plain_tail

    def _tail_of(self, fields: EventFields, prompt: bytes = NULL) -> bytes:
        """An event from the end of its delta to the place of the stamp. prompt: JSON from its ids on."""
        options, logprobs, finish = self._options, NULL, NULL
        if fields.logprobs is not None:
            logprobs = encode(chat_logprobs(fields.logprobs, options.num_top))
        if fields.finish is not None:
            finish = encode(_finish_reason(options, fields.finish, self._num_calls > 0 and not self._is_open))
        return b"".join(
            (
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish,
                b',"stop_reason":',
                encode(fields.stop_reason),
                b',"token_ids":',
                encode(fields.token_ids),
                b'}],"prompt_token_ids":',  # as in vLLM: a field of the answer
                prompt,
                usage_field(options, fields.usage),
            )
        )


def _events(options: ResponseOptions) -> OpenAIEvents:
    fields = b',"choices":[],"prompt_token_ids":null'
    return OpenAIEvents(options, ChatEvents, event_head(options, EVENT_KIND) + fields)


def _whole(options: ResponseOptions, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    return encode(
        ChatAnswer(
            options.answer_id,
            KIND,
            options.created,
            options.model,
            [_choice(options, index, choice) for index, choice in enumerate(choices)],
            usage_info(usage),
            shown_prompt_logprobs(options, choices[0].prompt_logprobs),
            choices[0].prompt_ids,
            choices[0].prompt_text,
            **server_fields(options),
            kv_transfer_params=raw_object(choices[0].kv_transfer_params),
        )
    )


def _choice(options: ResponseOptions, index: int, choice: FinishedChoice) -> ChatChoice:
    of_calls = [part.kind for part in choice.parts if part.kind in (PartKind.CALL, PartKind.CALL_END)]
    has_calls = of_calls[-1:] == [PartKind.CALL_END]
    return ChatChoice(
        index,
        _message(options, choice.parts),
        chat_logprobs(choice.logprobs, options.num_top) if options.logprobs else None,
        _finish_reason(options, choice.finish, has_calls),
        choice.stop_reason,
        choice.output_ids,
    )


def _message(options: ResponseOptions, parts: Sequence[Part]) -> AnswerMessage:
    content, reasoning = _text(parts, PartKind.CONTENT), _text(parts, PartKind.REASONING)
    if content is None and not options.has_reader:
        content = ""
    if options.echo_message:
        content = options.echo_message + (content or "")
    begun = _calls(parts)
    is_older = options.function_call and bool(begun)
    return AnswerMessage(
        options.role,
        content,
        function_call=NamedArguments(begun[0][0].text, begun[0][1]) if is_older else None,
        tool_calls=[] if is_older else [_tool_call(options, call, arguments) for call, arguments in begun],
        reasoning=reasoning,
        reasoning_content=reasoning,
    )


def _calls(parts: Sequence[Part]) -> list[tuple[Part, str]]:
    """The part that begins each call, with the call's arguments."""
    begun: list[tuple[Part, list[str]]] = []
    for part in parts:
        if part.kind == PartKind.CALL:
            begun.append((part, []))
        elif part.kind == PartKind.ARGUMENTS:
            begun[-1][1].append(part.text)
    return [(call, "".join(pieces)) for call, pieces in begun]


def _tool_call(options: ResponseOptions, call: Part, arguments: str) -> FunctionCall | CustomCall:
    if call.text in options.custom_tools:
        return CustomCall(call.call_id, CustomInput(call.text, arguments))
    return FunctionCall(call.call_id, NamedArguments(call.text, arguments))


def _text(parts: Sequence[Part], kind: PartKind) -> str | None:
    texts = [part.text for part in parts if part.kind == kind]
    return "".join(texts) if texts else None


def _finish_reason(options: ResponseOptions, finish: FinishReason, has_calls: bool) -> str:
    """`has_calls`: the answer has calls, and the last one is whole."""
    if finish != FinishReason.STOP or not has_calls:
        return FINISH_REASONS[finish]
    return "function_call" if options.function_call else "tool_calls"


CHAT = Api(
    name="chat",
    paths=("/v1/chat/completions",),
    schema=ChatRequest,
    parse=parse_chat,
    events=_events,
    whole=_whole,
    error_body=error_body,
)
