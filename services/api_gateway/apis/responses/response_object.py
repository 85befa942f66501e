"""The object of an answer: whole, and in the first and last events of a stream."""

import time

import msgspec

from blockyard.services.api_gateway.apis.interface import Usage
from blockyard.services.api_gateway.apis.openai_fields import encode
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.shared.errors import RequestError

ERROR_CODES = {429: "rate_limit_exceeded"}


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseEnd(msgspec.Struct, frozen=True):
    """The fields that change while an answer is written, but for its items."""

    status: str
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    completed_at: int | None = None


QUEUED, STARTED, CANCELLED = ResponseEnd("queued"), ResponseEnd("in_progress"), ResponseEnd("cancelled")


def finished(usage: Usage, cut: bool) -> ResponseEnd:
    """`cut`: a limit on its tokens ended the answer."""
    shown = ResponseUsage(
        usage.prompt,
        InputTokensDetails(usage.cached or 0),
        usage.completion,
        OutputTokensDetails(usage.reasoning or 0),
        usage.prompt + usage.completion,
    )
    if cut:
        return ResponseEnd("incomplete", incomplete_details=IncompleteDetails("max_output_tokens"), usage=shown)
    return ResponseEnd("completed", usage=shown, completed_at=int(time.time()))


def failed(error: RequestError) -> ResponseEnd:
    code = error.code or ERROR_CODES.get(error.status, "invalid_prompt" if error.status < 500 else "server_error")
    return ResponseEnd("failed", ResponseError(code, str(error)))


def response_object(options: ResponseOptions, end: ResponseEnd, items: list[bytes]) -> bytes:
    """The JSON of an answer with these items."""
    assert options.responses is not None
    return b'{"id":%b,"object":"response","created_at":%d,"model":%b,%b,%b,"output":[%b]}' % (
        encode(options.answer_id),
        options.created,
        encode(options.model),
        options.responses.repeated,
        encode(end)[1:-1],
        b",".join(items),
    )
