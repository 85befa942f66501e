"""Stored responses: API gateway <-> API gateway. The id of a response names the gateway that keeps it."""

import enum

from blockyard.shared.messages.base import Frame, FrameStruct


class ResponseVerb(enum.IntEnum):
    READ = 0
    CANCEL = 1  # ends a background response; answered with what it has
    DELETE = 2
    EVENTS = 3  # of a background response that is streamed, after a number; answered once there are some


class StoredResponse(FrameStruct, frozen=True):
    """A response as its gateway keeps it, without its events."""

    response_id: str
    tenant: str  # of the API key that it belongs to
    previous: str  # id of the response that it continues; empty: none
    data: bytes  # its object as JSON
    input_items: bytes  # a JSON list: its own input, without the items of the responses before
    background: bool = False
    streams: bool = False  # its events are kept, too
    ended: bool = True


class ResponseQuery(Frame, frozen=True):
    """Asks the gateway that keeps a response."""

    request_id: str
    response_id: str
    tenant: str
    verb: ResponseVerb
    after: int = -1  # events: the sequence number of the last one that is known


class ResponseReply(Frame, frozen=True):
    """Answers ResponseQuery: a response, a piece of its events, or an error."""

    request_id: str
    response: StoredResponse | None = None
    events: bytes = b""  # whole ones
    last: int = -1  # sequence number of the last event in `events`; without any, `after` of the query
    ended: bool = False  # no event comes behind these
    status: int = 200  # of an error, with its message and field
    message: str = ""
    field: str = ""
    code: str = ""
