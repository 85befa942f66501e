"""Frames between a gateway and its body process, on the process's standard input and output."""

import struct
from typing import BinaryIO

import msgspec

from blockyard.services.api_gateway.bodies.parse_body import ParseContext, ParsedBody
from blockyard.shared.errors import RequestError

HEAD = struct.Struct("<II")  # bytes of the frame, and of the body after it


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A RequestError as a frame."""

    message: str
    field: str
    status: int
    code: str | None
    retry_after_s: float | None

    @classmethod
    def of(cls, error: RequestError) -> "Rejected":
        return cls(str(error), error.field, error.status, error.code, error.retry_after_s)

    def error(self) -> RequestError:
        return RequestError(self.message, self.field, self.status, self.code, self.retry_after_s)


TOO_LONG = Rejected("the body takes too long to be read", "body", 413, None, None)
TOO_LARGE = Rejected("the body needs too much memory to be read", "body", 413, None, None)
TOO_WIDE = Rejected("an integer of the body has more than 64 bits", "body", 400, None, None)
FAILED = Rejected("The server failed at this request.", "", 500, None, None)

ParseResult = ParsedBody | Rejected

encode = msgspec.msgpack.Encoder().encode
decode_context = msgspec.msgpack.Decoder(ParseContext).decode
decode_result = msgspec.msgpack.Decoder(ParseResult).decode


def framed(frame: msgspec.Struct, num_body_bytes: int = 0) -> bytes:
    data = encode(frame)
    return HEAD.pack(len(data), num_body_bytes) + data


def read_frame(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    """The next frame and the body after it; None at the end of the stream."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    num_bytes, num_body_bytes = HEAD.unpack(head)
    data, body = stream.read(num_bytes), stream.read(num_body_bytes)
    return (data, body) if len(data) == num_bytes and len(body) == num_body_bytes else None
