"""The API of /v1/responses: the events of a streamed answer, and the object of a whole one.

Each event has the next `sequence_number`, and one of text alone costs one join.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from blockyard.services.api_gateway.apis.interface import PLAIN, Api, EventFields, FinishedChoice, Usage
from blockyard.services.api_gateway.apis.logprobs import ContentToken
from blockyard.services.api_gateway.apis.openai_fields import encode, error_body
from blockyard.services.api_gateway.apis.responses.output_items import (
    COMPLETED,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OpenItem,
    OutputItem,
    OutputItems,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SearchCallItem,
    content_tokens,
    end_status,
    whole_items,
)
from blockyard.services.api_gateway.apis.responses.parse import parse_responses, parse_stored
from blockyard.services.api_gateway.apis.responses.response_object import (
    CANCELLED,
    STARTED,
    ResponseEnd,
    failed,
    finished,
    response_object,
)
from blockyard.services.api_gateway.apis.responses.schemas import OF_CHAT, REFUSED, ResponsesRequest
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason, TextLogprobs
from blockyard.shared.output_parsing.parts import Part, PartKind

# of each kind of item: the events of a piece of its text and of all of it, and the field that has all of it
TEXT_EVENTS: dict[type[OutputItem], tuple[bytes, bytes]] = {
    MessageItem: (b"response.output_text", b"text"),
    ReasoningItem: (b"response.reasoning_text", b"text"),
    FunctionCallItem: (b"response.function_call_arguments", b"arguments"),
    CustomCallItem: (b"response.custom_tool_call_input", b"input"),
}
PIECES = dict.fromkeys(TEXT_EVENTS, PartKind.ARGUMENTS)
PIECES |= {MessageItem: PartKind.CONTENT, ReasoningItem: PartKind.REASONING}


class ResponsesEvents:
    """Writes the events of the answer and of its only choice: both share their items."""

    same_around_text = None

    def __init__(self, options: ResponseOptions) -> None:
        self._options, self._items = options, OutputItems(options)
        self._next = 0  # sequence number
        self._head = b""  # of an event with a piece of the open item's text, up to that
        self._pieces: list[str] = []  # of the open item
        self._goes_on: PartKind | None = None  # parts of this kind are pieces of the open item's text
        self._held: list[TextLogprobs] = []  # of tokens that wait for their text
        self._call_ended = False  # by the event before
        self._is_cut = False
        self.final = b""  # the answer's object, from its end on

    def choice(self, index: int, prompt_ids: list[int] | None, prompt_text: str | None = None) -> "ResponsesEvents":
        assert index == 0  # a request has one answer
        return self

    def around_text(self, text: str, stamp_s: float | None) -> tuple[bytes, bytes] | None:
        if self._goes_on is not PartKind.CONTENT:
            return None
        self._pieces.append(text)
        number, self._next = self._next, self._next + 1
        return self._head, b',"sequence_number":%d}\n\n' % number

    def opening(self, usage: Usage | None) -> bytes:
        shown = b'"response":' + response_object(self._options, STARTED, [])
        return self._event(b"response.created", shown) + self._event(b"response.in_progress", shown)

    def event(self, part: Part | None, fields: EventFields) -> bytes:
        if part is not None and fields is PLAIN and part.kind is self._goes_on and part.text and not self._held:
            self._pieces.append(part.text)  # nearly every token
            number, self._next = self._next, self._next + 1
            return b'%b%b,"sequence_number":%d}\n\n' % (self._head, encode(part.text), number)
        data, behind_call = b"", self._call_ended
        self._call_ended = part is not None and part.kind is PartKind.CALL_END
        if fields.logprobs and not (behind_call and part is None):  # they belong to the call's end
            self._held += fields.logprobs
        if part is not None and (part.text or part.kind is not PartKind.CONTENT):
            data = self._part(part)
        if fields.finish is not None:
            self._is_cut = fields.finish is FinishReason.LENGTH
            open_item = self._items.open
            if open_item is not None:
                data += self._close(open_item, end_status(open_item, self._is_cut))
        return data

    def ending(self, usage: Callable[[], Usage]) -> bytes:
        return self._last(finished(usage(), self._is_cut))

    def failed(self, error: RequestError) -> bytes:
        """The item that is open does not end: a client would run a call that has no end."""
        return self._last(failed(error))

    def cancelled(self) -> bytes:
        """The client does not want the rest. There is no event of that name."""
        self.final = response_object(self._options, CANCELLED, self._items.done)
        return self._event(b"response.incomplete", b'"response":' + self.final)

    def so_far(self, end: ResponseEnd) -> bytes:
        """The answer's object with the items that have ended."""
        return response_object(self._options, end, self._items.done)

    def _last(self, end: ResponseEnd) -> bytes:
        self.final = self.so_far(end)
        return self._event(b"response." + end.status.encode(), b'"response":' + self.final)

    def _part(self, part: Part) -> bytes:
        items, data = self._items, b""
        held, self._held = self._held, []  # they are of this part, and not of an item before it
        if not items.goes_on(part):
            if items.open is not None:
                data = self._close(items.open, COMPLETED)
            data += self._open(items.begin(part))
        assert items.open is not None
        logprobs: list[ContentToken] | None = None
        if held and items.open.kind is MessageItem:
            logprobs = content_tokens(held, self._options, part.text)
            items.open.logprobs += logprobs
        if part.kind is PartKind.CALL_END:
            return data + self._close(items.open, COMPLETED)
        if part.kind is PartKind.CALL:
            return data
        self._pieces.append(part.text)
        if not self._head:  # the item has no pieces
            return data
        number, self._next = self._next, self._next + 1
        head = self._head if logprobs is None else self._text_head(items.open, logprobs)
        return b'%b%b%b,"sequence_number":%d}\n\n' % (data, head, encode(part.text), number)

    def _open(self, item: OpenItem) -> bytes:
        self._pieces, self._head = item.pieces, self._text_head(item, [])
        self._goes_on = PIECES[item.kind] if self._head else None
        data = self._event(
            b"response.output_item.added", b'"output_index":%d,"item":%b' % (item.index, encode(item.begun()))
        )
        if item.kind in (MessageItem, ReasoningItem):
            data += self._content_part(b"added", item, "", [])
        return data

    def _close(self, item: OpenItem, status: str) -> bytes:
        data = b""
        if self._held and item.kind is MessageItem:  # tokens without text: special tokens, or tokens of a cut character
            logprobs, self._held = content_tokens(self._held, self._options), []
            item.logprobs += logprobs
            number, self._next = self._next, self._next + 1
            data = b'%b"","sequence_number":%d}\n\n' % (self._text_head(item, logprobs), number)
        text = item.text
        self._goes_on, self._head = None, b""
        if item.kind in TEXT_EVENTS:
            kind, field = TEXT_EVENTS[item.kind]
            all_of_it = b'%b,"%b":%b' % (_place(item), field, encode(text))
            if item.kind is MessageItem:
                all_of_it += b',"logprobs":' + encode(item.logprobs)
            data += self._event(kind + b".done", all_of_it)
        if item.kind in (MessageItem, ReasoningItem):
            data += self._content_part(b"done", item, text, item.logprobs)
        index, shown = item.index, self._items.end(status)
        return data + self._event(b"response.output_item.done", b'"output_index":%d,"item":%b' % (index, shown))

    def _content_part(self, end: bytes, item: OpenItem, text: str, logprobs: list[ContentToken]) -> bytes:
        part: msgspec.Struct = OutputText(text, [], logprobs) if item.kind is MessageItem else ReasoningText(text)
        return self._event(b"response.content_part." + end, b'%b,"part":%b' % (_place(item), encode(part)))

    def _text_head(self, item: OpenItem, logprobs: list[ContentToken]) -> bytes:
        """An event with a piece of the item's text, up to that. Empty for items without pieces."""
        if item.kind is SearchCallItem:
            return b""
        kind = TEXT_EVENTS[item.kind][0] + b".delta"
        tokens = b',"logprobs":' + encode(logprobs) if item.kind is MessageItem else b""
        return b'event: %b\ndata: {"type":"%b",%b%b,"delta":' % (kind, kind, _place(item), tokens)

    def _event(self, kind: bytes, fields: bytes) -> bytes:
        number, self._next = self._next, self._next + 1
        return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (kind, kind, fields, number)


def failed_event(answer: bytes, number: int) -> bytes:
    """The last event of a failed answer without its other events, which are lost; `answer`: its object."""
    return b'event: response.failed\ndata: {"type":"response.failed","response":%b,"sequence_number":%d}\n\n' % (
        answer,
        number,
    )


def _place(item: OpenItem) -> bytes:
    """The fields that say to what an event belongs."""
    place = b'"item_id":%b,"output_index":%d' % (encode(item.id), item.index)
    return place + b',"content_index":0' if item.kind in (MessageItem, ReasoningItem) else place


def _whole(options: ResponseOptions, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    [choice] = choices
    cut = choice.finish is FinishReason.LENGTH
    items = whole_items(options, choice.parts, choice.logprobs, choice.logprob_ends, cut)
    return response_object(options, finished(usage, cut), items)


class InputTokens(msgspec.Struct, frozen=True):
    """The answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


RESPONSES = Api(
    name="responses",
    paths=("/v1/responses",),
    schema=ResponsesRequest,
    refused=frozenset((*REFUSED, *OF_CHAT)),
    parse=parse_responses,
    parse_stored=parse_stored,
    events=ResponsesEvents,
    whole=_whole,
    error_body=error_body,
    streamed_codes=("context_length_exceeded",),
    tries_websocket=True,
)
INPUT_TOKENS = replace(
    RESPONSES,
    name="input_tokens",
    paths=("/v1/responses/input_tokens",),
    count=lambda number: encode(InputTokens(number)),
    tries_websocket=False,
)
