"""Fields and bytes that the chat and completions APIs of OpenAI have in common, with vLLM's additions."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from blockyard.services.api_gateway.apis.interface import ChoiceEvents, Usage
from blockyard.services.api_gateway.apis.logprobs import PromptToken, prompt_logprobs
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason, TextLogprobs

encode = msgspec.json.Encoder().encode

NULL = b"null"
NULL_VALUE = msgspec.Raw(NULL)
DONE = b"data: [DONE]\n\n"
# other choices end with an error
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.REPETITION: "repetition"}
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ERROR_CODES = {
    401: "invalid_api_key",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
PromptLogprobs = list[dict[int, PromptToken] | None]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class UsageInfo(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


def usage_info(usage: Usage) -> UsageInfo:
    return UsageInfo(
        usage.prompt,
        usage.prompt + usage.completion,
        usage.completion,
        None if usage.cached is None else PromptTokensDetails(usage.cached),
        None if usage.reasoning is None else CompletionTokensDetails(usage.reasoning),
    )


def event_head(options: ResponseOptions, kind: str) -> bytes:
    """An event with the fields that all events of an answer have; its object is still open."""
    fields = {"id": options.answer_id, "object": kind, "created": options.created, "model": options.model}
    fields |= {name: value for name, value in server_fields(options).items() if value is not None}
    return b"data: " + encode(fields)[:-1]


def server_fields(options: ResponseOptions) -> dict[str, str | None]:
    """Fields that say how this server is set up."""
    return {"service_tier": options.service_tier, "system_fingerprint": options.system_fingerprint}


def raw_object(json: bytes) -> msgspec.Raw:
    """A JSON object as a field of an answer; empty: null."""
    return msgspec.Raw(json) if json else NULL_VALUE


def usage_field(options: ResponseOptions, usage: Usage | None) -> bytes:
    if not (options.include_usage or options.continuous_usage):
        return b""
    return b',"usage":' + (NULL if usage is None else encode(usage_info(usage)))


def close_event(stamp_s: float | None) -> bytes:
    return b"}\n\n" if stamp_s is None else b',"stamp":%b}\n\n' % encode(stamp_s)


def shown_prompt_logprobs(options: ResponseOptions, logprobs: list[TextLogprobs]) -> PromptLogprobs | None:
    num_top = options.prompt_logprobs
    return None if num_top is None else prompt_logprobs(logprobs, num_top)


class ErrorInfo(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct, frozen=True):
    error: ErrorInfo


def error_body(error: RequestError) -> bytes:
    error_type = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code = error.code or ERROR_CODES.get(error.status)
    return encode(OpenAIError(ErrorInfo(str(error), error_type, error.field or None, code)))


@dataclass(frozen=True, slots=True)
class OpenAIEvents:
    """Writes a streamed answer: the events of its choices, its usage if asked for, and the mark of its end."""

    options: ResponseOptions
    make_choice: Callable[[ResponseOptions, int, list[int] | None, str | None], ChoiceEvents]
    usage_head: bytes  # the event with the usage, up to that

    def choice(self, index: int, prompt_ids: list[int] | None, prompt_text: str | None = None) -> ChoiceEvents:
        return self.make_choice(self.options, index, prompt_ids, prompt_text)

    def ending(self, usage: Callable[[], Usage]) -> bytes:
        if not self.options.include_usage:
            return DONE
        return self.usage_head + usage_field(self.options, usage()) + close_event(None) + DONE

    def failed(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"
