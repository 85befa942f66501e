"""Checks chat messages of a request and turns them into the messages of a chat template."""

import msgspec

from blockyard.shared.errors import RequestError, not_built

NULL = msgspec.Raw(b"null")


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: msgspec.Raw = NULL
    input_audio: msgspec.Raw = NULL
    video_url: msgspec.Raw = NULL
    audio_url: msgspec.Raw = NULL
    file: msgspec.Raw = NULL
    detail: msgspec.Raw = NULL
    uuid: msgspec.Raw = NULL
    annotations: msgspec.Raw = NULL


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Also accepts the fields of an earlier answer that a client sends back."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: msgspec.Raw = NULL
    tool_calls: msgspec.Raw = NULL
    tool_call_id: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    audio: msgspec.Raw = NULL


class TextPart(msgspec.Struct, frozen=True):
    type: str
    text: str


class TemplateMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message as a chat template sees it. The tokenizer joins parts if the template expects one text."""

    role: str
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None


def read_messages(messages: list[Message] | None) -> bytes:
    """Returns the messages as JSON for Tokenize. Raises RequestError."""
    if not messages:
        raise RequestError("`messages` is empty" if messages == [] else "`messages` is missing", "messages")
    return msgspec.json.encode([_message(m, f"messages[{i}]") for i, m in enumerate(messages)])


def _message(message: Message, where: str) -> TemplateMessage:
    if message.role == "tool":
        raise not_built(f"{where}.role", "messages of the role tool need tool calls")
    for name in ("tool_calls", "function_call", "audio"):
        if bytes(getattr(message, name)) not in (bytes(NULL), b"[]"):
            raise not_built(f"{where}.{name}")
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise RequestError("content is missing", f"{where}.content")
        content = message.refusal or ""
    shown: str | list[TextPart] = content if isinstance(content, str) else _parts(content, f"{where}.content")
    return TemplateMessage(message.role, shown, message.name, message.reasoning_content or message.reasoning)


def _parts(content: list[ContentPart], where: str) -> str | list[TextPart]:
    """Returns the text of a single part, or the list of parts."""
    texts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return texts[0] if len(texts) == 1 else [TextPart("text", text) for text in texts]


def _part(part: ContentPart, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in ("text", "refusal"):
        raise RequestError(f"a part of type {part.type} needs the field {part.type}", f"{where}.{part.type}")
    raise RequestError(
        f"this model takes text alone: parts of type {part.type[:40]!r} are not built yet",
        f"{where}.type",
        code="unsupported_content",
    )
