"""The items of one answer, made of its parts in the order in which the model wrote them."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from blockyard.services.api_gateway.apis.hidden_reasoning import hide_reasoning
from blockyard.services.api_gateway.apis.logprobs import ContentToken, chat_logprobs
from blockyard.services.api_gateway.apis.openai_fields import encode
from blockyard.services.api_gateway.apis.responses.stored_items import OUTPUT_MARK, response_name
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions, ResponsesOptions
from blockyard.shared.messages import TextLogprobs
from blockyard.shared.output_parsing.parts import Part, PartKind

NAMESPACE = msgspec.UNSET  # of a tool that is in none
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[None] = []
    logprobs: list[ContentToken] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    encrypted_content: str | None
    summary: list[None] = []


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = NAMESPACE


class CustomCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | msgspec.UnsetType = NAMESPACE


class SearchCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="tool_search_call"):
    id: str
    status: str
    call_id: str
    arguments: Any
    execution: str = "client"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | SearchCallItem
ID_PREFIX = {
    MessageItem: "msg",
    ReasoningItem: "rs",
    FunctionCallItem: "fc",
    CustomCallItem: "ctc",
    SearchCallItem: "tsc",
}


class OpenItem:
    """The item that the model writes at present."""

    __slots__ = ("_call", "_options", "id", "index", "kind", "logprobs", "pieces")

    def __init__(self, part: Part, options: ResponseOptions, name: str, index: int) -> None:
        """`part` is its first one; the name makes its id unique."""
        self._options, self._call, self.index = options, part, index
        self.kind: type[OutputItem] = item_kind(part, options)
        self.id = f"{ID_PREFIX[self.kind]}_{name}{index:02x}"
        self.pieces: list[str] = []  # of its text
        self.logprobs: list[ContentToken] = []  # of a message

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begun(self) -> OutputItem:
        """The item before its first piece of text."""
        if self.kind is MessageItem:
            return MessageItem(self.id, IN_PROGRESS, [])
        if self.kind is ReasoningItem:
            return ReasoningItem(self.id, IN_PROGRESS, [], None)
        return self._called("", IN_PROGRESS)

    def item(self, status: str) -> OutputItem:
        text = self.text
        if self.kind is MessageItem:
            return MessageItem(self.id, status, [OutputText(text, [], self.logprobs)])
        if self.kind is ReasoningItem:
            encrypts = _own(self._options).encrypted_reasoning
            return ReasoningItem(self.id, status, [ReasoningText(text)], hide_reasoning(text) if encrypts else None)
        return self._called(text, status)

    def _called(self, text: str, status: str) -> OutputItem:
        call = self._call
        if self.kind is SearchCallItem:
            return SearchCallItem(self.id, status, call.call_id, _search_arguments(text))
        namespace, name = _own(self._options).tool_names.get(call.text, (NAMESPACE, call.text))
        if self.kind is CustomCallItem:
            return CustomCallItem(self.id, status, call.call_id, name, text, namespace)
        return FunctionCallItem(self.id, status, call.call_id, name, text, namespace)


class OutputItems:
    """At most one item is open: the parts of an answer follow each other."""

    def __init__(self, options: ResponseOptions) -> None:
        own = options.responses
        self._options, self._name = options, secrets.token_hex(12)
        if own is not None and own.store is not None:  # they name the response that they are in
            self._name = response_name(options.answer_id) + OUTPUT_MARK
        self.open: OpenItem | None = None
        self.done: list[bytes] = []  # as JSON

    def begin(self, part: Part) -> OpenItem:
        """Opens the item that begins with this part. None may be open."""
        assert self.open is None
        self.open = OpenItem(part, self._options, self._name, len(self.done))
        return self.open

    def goes_on(self, part: Part) -> bool:
        """Whether the open item has this part, too."""
        if self.open is None or part.kind is PartKind.CALL:
            return False
        is_call = self.open.kind not in (MessageItem, ReasoningItem)
        if part.kind in (PartKind.ARGUMENTS, PartKind.CALL_END):
            return is_call
        return self.open.kind is (MessageItem if part.kind is PartKind.CONTENT else ReasoningItem)

    def end(self, status: str) -> bytes:
        """Closes the open item. Returns its JSON."""
        assert self.open is not None
        data = encode(self.open.item(status))
        self.open = None
        self.done.append(data)
        return data


def item_kind(part: Part, options: ResponseOptions) -> type[OutputItem]:
    if part.kind is PartKind.CONTENT:
        return MessageItem
    if part.kind is PartKind.REASONING:
        return ReasoningItem
    if part.text in options.custom_tools:
        return CustomCallItem
    return SearchCallItem if part.text == _own(options).search_tool else FunctionCallItem


def content_tokens(logprobs: Sequence[TextLogprobs], options: ResponseOptions, text: str = "") -> list[ContentToken]:
    """Returns the text's tokens, which may follow tokens of markers that are in no text; without a text, all tokens."""
    first = len(logprobs)
    if text and options.has_reader and not options.tokens_as_ids:
        left = len(text.encode("utf-8", "replace"))
        while first and left > 0:
            first -= 1
            left -= len(logprobs[first].token)
    else:
        first = 0
    return chat_logprobs(list(logprobs[first:]), options.num_top).content


def end_status(open_item: OpenItem, cut: bool) -> str:
    """The status of the item in which an answer ends; `cut`: it ends because of a limit on its tokens."""
    is_call = open_item.kind not in (MessageItem, ReasoningItem)
    return INCOMPLETE if cut or is_call else COMPLETED


def whole_items(
    options: ResponseOptions,
    parts: Sequence[Part],
    logprobs: Sequence[TextLogprobs],
    ends: Sequence[int],
    cut: bool,
) -> list[bytes]:
    """The items of a finished answer. `ends` says for each part how many of the `logprobs` had come with it."""
    items, begin = OutputItems(options), 0
    ends = ends or [len(logprobs)] * len(parts)
    for i, part in enumerate(parts):
        if part.kind is PartKind.CONTENT and not part.text:
            continue
        if not items.goes_on(part):
            if items.open is not None:
                items.end(COMPLETED)
            items.begin(part)
        assert items.open is not None
        end = ends[i] if i < len(ends) else len(logprobs)
        if part.kind is PartKind.CALL_END:
            items.end(COMPLETED)
        elif part.kind is not PartKind.CALL:
            items.open.pieces.append(part.text)
            if part.kind is PartKind.CONTENT and options.logprobs:
                items.open.logprobs += content_tokens(logprobs[begin:end], options, part.text)
        begin = end
    if items.open is not None:
        if items.open.kind is MessageItem and options.logprobs:
            items.open.logprobs += content_tokens(logprobs[begin:], options)
        items.end(end_status(items.open, cut))
    return items.done


def _search_arguments(text: str) -> Any:
    """The arguments as JSON has them; the text itself if it is cut."""
    if not text:
        return {}
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text


def _own(options: ResponseOptions) -> ResponsesOptions:
    assert options.responses is not None
    return options.responses
