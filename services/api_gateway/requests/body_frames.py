"""Frames between a gateway and its body reader, on the reader's standard input and output."""

import struct
from typing import BinaryIO

import msgspec

from blockyard.services.api_gateway.requests.parse_body import Asked, Terms
from blockyard.services.api_gateway.responses.error_body import ApiError

HEAD = struct.Struct("<II")  # bytes of a frame, and of the body behind it


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """An ApiError, as it travels."""

    message: str
    field: str
    status: int
    code: str | None
    retry_after_s: float | None

    @classmethod
    def of(cls, error: ApiError) -> "Rejected":
        return cls(str(error), error.field, error.status, error.code, error.retry_after_s)

    def error(self) -> ApiError:
        return ApiError(self.message, self.field, self.status, self.code, self.retry_after_s)


TOO_LONG = Rejected("the body takes too long to be read", "body", 413, None, None)
TOO_LARGE = Rejected("the body needs too much memory to be read", "body", 413, None, None)
FAILED = Rejected("The server failed at this request.", "", 500, None, None)

Answer = Asked | Rejected

encode = msgspec.msgpack.Encoder().encode
decode_terms = msgspec.msgpack.Decoder(Terms).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def framed(frame: msgspec.Struct, num_body_bytes: int = 0) -> bytes:
    data = encode(frame)
    return HEAD.pack(len(data), num_body_bytes) + data


def read_frame(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    """The next frame's data and body; None at the end."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    num_bytes, num_body_bytes = HEAD.unpack(head)
    data, body = stream.read(num_bytes), stream.read(num_body_bytes)
    return (data, body) if len(data) == num_bytes and len(body) == num_body_bytes else None
