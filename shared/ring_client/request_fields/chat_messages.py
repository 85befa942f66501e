"""Checks chat messages of a request and settles their spelling. The tokenizer makes of them what a template sees."""

from typing import Any, Literal

import msgspec

from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.tool_parsers.tools import CUSTOM_INPUT

NULL = msgspec.Raw(b"null")
# parts of content that are text, with the field that holds it; agents send back those of /v1/responses, too
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: msgspec.Raw = NULL
    input_audio: msgspec.Raw = NULL
    video_url: msgspec.Raw = NULL
    audio_url: msgspec.Raw = NULL
    file: msgspec.Raw = NULL
    detail: msgspec.Raw = NULL
    uuid: msgspec.Raw = NULL
    annotations: msgspec.Raw = NULL


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The function of an earlier call. Clients send back what their libraries parsed, too."""

    name: str
    arguments: Any = None  # JSON text, or its value
    parsed_arguments: msgspec.Raw = NULL


class CalledCustom(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    name: str
    input: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    id: str | None = None
    type: Literal["function", "custom"] | None = None  # None is "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: msgspec.Raw = NULL  # of a streamed call


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Also accepts the fields of an earlier answer that a client sends back."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: msgspec.Raw = NULL
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # OpenAI's older form of one call
    audio: msgspec.Raw = NULL
    parsed: msgspec.Raw = NULL


def read_messages(messages: list[Message] | None) -> bytes:
    """Returns the messages as JSON for Tokenize, and changes them. Raises RequestError."""
    if not messages:
        raise RequestError("`messages` is empty" if messages == [] else "`messages` is missing", "messages")
    for i, message in enumerate(messages):
        _settle(message, f"messages[{i}]")
    try:
        return msgspec.json.encode(messages)
    except RecursionError as e:
        raise RequestError("the arguments of a call are nested too deeply", "messages") from e


def _settle(message: Message, where: str) -> None:
    """Leaves one spelling of what a message may say in several. Fields that no template reads are dropped."""
    if bytes(message.audio) not in (bytes(NULL), b"[]"):
        raise not_built(f"{where}.audio")
    if message.content is None:
        if message.role not in ("assistant", "tool"):  # a tool may have nothing to say
            raise RequestError("content is missing", f"{where}.content")
        message.content = message.refusal or ""
    elif not isinstance(message.content, str):
        message.content = _parts(message.content, f"{where}.content")
    if message.role == "tool":
        if not message.tool_call_id:
            raise RequestError("a message of the role tool needs the id of its call", f"{where}.tool_call_id")
    elif message.role == "function":
        if not message.name:
            raise RequestError("a message of the role function needs the function's name", f"{where}.name")
        message.role, message.tool_call_id = "tool", _id_of(message.name)
    else:
        message.tool_call_id = None
    message.reasoning_content = message.reasoning_content or message.reasoning
    message.tool_calls = _calls(message, where)
    message.refusal = message.reasoning = message.function_call = None
    message.annotations = message.audio = message.parsed = NULL


def _calls(message: Message, where: str) -> list[ToolCall] | None:
    """The calls of an assistant's message; an older `function_call` is one of them. None: there are none."""
    given, older = message.tool_calls or [], message.function_call
    if not given and older is None:
        return None
    if message.role != "assistant":
        field = "tool_calls" if given else "function_call"
        raise RequestError(f"calls belong into messages of the role assistant, not {message.role}", f"{where}.{field}")
    calls = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(given)]
    if older is not None:
        calls.append(_function_call(_id_of(older.name), older.name, older.arguments))
    return calls


def _call(call: ToolCall, where: str) -> ToolCall:
    if not call.id:
        raise RequestError("a tool call needs its id", f"{where}.id")
    if call.type == "custom":
        if call.custom is None:
            raise RequestError("a call of type custom needs the field custom", f"{where}.custom")
        # as templates show the tool: a function with one argument
        return _function_call(call.id, call.custom.name, {CUSTOM_INPUT: call.custom.input})
    if call.function is None:
        raise RequestError("a call of type function needs the field function", f"{where}.function")
    return _function_call(call.id, call.function.name, call.function.arguments)


def _function_call(call_id: str, name: str, arguments: Any) -> ToolCall:
    function = CalledFunction(name=name, arguments={} if arguments is None else arguments)
    return ToolCall(id=call_id, type="function", function=function)


def _id_of(name: str) -> str:
    """The id of a call in the older form, which has none: its result names the function alone."""
    return f"call_{name}"


def _parts(content: list[ContentPart], where: str) -> str | list[ContentPart]:
    """Returns the text of a single part, or the list of parts."""
    texts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return texts[0] if len(texts) == 1 else [ContentPart(type="text", text=text) for text in texts]


def _part(part: ContentPart, where: str) -> str:
    if (field := TEXT_PARTS.get(part.type)) is not None:
        text: str | None = getattr(part, field)
        if text is None:
            raise RequestError(f"a part of type {part.type} needs the field {field}", f"{where}.{field}")
        return text
    raise RequestError(
        f"this model takes text alone: parts of type {part.type[:40]!r} are not built yet",
        f"{where}.type",
        code="unsupported_content",
    )
