"""OpenAI's batch format: lines of requests and lines of answers. Pure."""

from dataclasses import dataclass

import msgspec

from blockyard.services.api_gateway.apis.interface import Api
from blockyard.services.api_gateway.apis.pooling.interface import PoolingApi
from blockyard.services.api_gateway.apis.pooling.registry import POOLING_APIS
from blockyard.services.api_gateway.apis.registry import APIS

LineApi = Api | PoolingApi
_APIS: list[LineApi] = [*APIS.values(), *POOLING_APIS.values()]
BY_URL: dict[str, LineApi] = {path: api for api in _APIS for path in api.paths}
REPEATED = "duplicate_custom_id"
MAX_SHOWN = 200  # characters of the input in a message


class RequestLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class AnyLine(msgspec.Struct, frozen=True):
    """The fields that identify a line of the input that is otherwise wrong."""

    custom_id: str | None = None


class LineError(msgspec.Struct, frozen=True):
    """Why a line is no request."""

    code: str
    message: str
    line: int | None = None  # of the input, from 1; None in files of other servers


class LineResponse(msgspec.Struct, frozen=True):
    """The answer that a server would have sent."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class AnswerLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None


class WrittenLine(msgspec.Struct, frozen=True):
    """The fields that are read again of a line of the output."""

    custom_id: str | None
    error: LineError | None = None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    api: LineApi
    body: bytes


@dataclass(frozen=True, slots=True)
class WrongLine:
    """A line of the input that is no request; its `custom_id`, if that can be read."""

    custom_id: str | None
    error: LineError


_decode = msgspec.json.Decoder(RequestLine).decode
_decode_any = msgspec.json.Decoder(AnyLine).decode
decode_written = msgspec.json.Decoder(WrittenLine).decode
_encode = msgspec.json.Encoder().encode


def read_line(line: bytes, number: int) -> BatchRequest | WrongLine:
    """Reads line `number` of the input. Its body is not looked at."""
    try:
        read = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        return _wrong(_custom_id(line), "invalid_json_line", f"line {number}: {e}", number)
    if read.method != "POST":
        text = f"line {number}: the method must be POST, got {read.method[:MAX_SHOWN]!r}"
        return _wrong(read.custom_id, "invalid_method", text, number)
    api = BY_URL.get(read.url)
    if api is None:
        text = f"line {number}: the url must be one of {', '.join(BY_URL)}, got {read.url[:MAX_SHOWN]!r}"
        return _wrong(read.custom_id, "invalid_url", text, number)
    return BatchRequest(read.custom_id, api, bytes(read.body))


def too_long(number: int, max_bytes: int) -> WrongLine:
    return _wrong(None, "line_too_long", f"line {number}: longer than {max_bytes} bytes (--max-body-bytes)", number)


def repeated(custom_id: str, number: int) -> WrongLine:
    text = f"line {number}: an earlier line has the custom_id {custom_id[:MAX_SHOWN]!r}"
    return _wrong(custom_id, REPEATED, text, number)


def other_url(custom_id: str, number: int, url: str) -> WrongLine:
    text = f"line {number}: the url must be {url}, the batch's endpoint"
    return _wrong(custom_id, "mismatched_endpoint", text, number)


def answer_line(line_id: str, custom_id: str, response: LineResponse) -> bytes:
    """The line of the output for a request; it has no end of line."""
    return _encode(AnswerLine(line_id, custom_id, response, None))


def error_line(line_id: str, wrong: WrongLine) -> bytes:
    return _encode(AnswerLine(line_id, wrong.custom_id, None, wrong.error))


def _wrong(custom_id: str | None, code: str, message: str, number: int) -> WrongLine:
    return WrongLine(custom_id, LineError(code, message, number))


def _custom_id(line: bytes) -> str | None:
    try:
        return _decode_any(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
