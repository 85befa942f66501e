"""Answers of /v1/completions: text as the model writes it, without calls or reasoning."""

from collections.abc import Sequence

import msgspec

from blockyard.services.api_gateway.apis.interface import (
    PLAIN,
    Api,
    EventFields,
    FinishedChoice,
    Usage,
)
from blockyard.services.api_gateway.apis.logprobs import CompletionLogprobs, completion_logprobs
from blockyard.services.api_gateway.apis.openai_fields import (
    FINISH_REASONS,
    NULL,
    NULL_VALUE,
    OpenAIEvents,
    PromptLogprobs,
    UsageInfo,
    close_event,
    encode,
    error_body,
    event_head,
    raw_object,
    server_fields,
    shown_prompt_logprobs,
    usage_field,
    usage_info,
)
from blockyard.services.api_gateway.apis.text_offsets import TextOffsets
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.services.api_gateway.requests.schemas import CompletionRequest
from blockyard.services.api_gateway.requests.validate import parse_completion
from blockyard.shared.output_parsing.parts import Part

KIND = "text_completion"


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None = None


class CompletionAnswer(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo
    service_tier: str | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: msgspec.Raw = NULL_VALUE


class CompletionEvents:
    """The events of one choice. The first one has the prompt's ids."""

    __slots__ = ("_offsets", "_options", "_prompt_ids", "_prompt_text", "_text_head", "_text_tail", "same_around_text")

    def __init__(
        self, options: ResponseOptions, index: int, prompt_ids: list[int] | None, prompt_text: str | None
    ) -> None:
        self._options, self._prompt_ids, self._prompt_text = options, prompt_ids, prompt_text
        self._offsets = TextOffsets(options.tokens_as_ids)
        self._text_head = b'%b,"choices":[{"index":%d,"text":' % (event_head(options, KIND), index)
        self._text_tail = self._tail("", PLAIN, b"null")
        self.same_around_text = self._text_head, self._text_tail + close_event(None)

    def around_text(self, text: str, stamp_s: float | None) -> tuple[bytes, bytes]:
        if stamp_s is None:
            return self.same_around_text
        return self._text_head, self._text_tail + close_event(stamp_s)

    def opening(self, usage: Usage | None) -> bytes:
        return b""

    def event(self, part: Part | None, fields: EventFields) -> bytes:
        text = "" if part is None else part.text
        if fields.echo is not None:
            text = fields.echo.text + text
        prompt = encode(self._prompt_ids)
        if self._prompt_text is not None:
            prompt += b',"prompt_text":' + encode(self._prompt_text)
        self._prompt_ids = self._prompt_text = None
        return self._text_head + encode(text) + self._tail(text, fields, prompt) + close_event(fields.stamp_s)

    def _tail(self, text: str, fields: EventFields, prompt: bytes) -> bytes:
        """An event from the end of its text to the place of the stamp. prompt: JSON from its ids on."""
        return b"".join(
            (
                b',"logprobs":',
                NULL if fields.logprobs is None else self._logprobs(text, fields),
                b',"finish_reason":',
                NULL if fields.finish is None else encode(FINISH_REASONS[fields.finish]),
                b',"stop_reason":',
                encode(fields.stop_reason),
                b',"token_ids":',
                encode(fields.token_ids),
                b',"prompt_token_ids":',
                prompt,
                b"}]",
                usage_field(self._options, fields.usage),
            )
        )

    def _logprobs(self, text: str, fields: EventFields) -> bytes:
        tokens, first_token = fields.logprobs or [], None
        if fields.echo is not None:
            tokens, first_token = [*fields.echo.logprobs, *tokens], fields.echo.first_token
        return encode(completion_logprobs(tokens, self._options.num_top, self._offsets, text, first_token))


def _events(options: ResponseOptions) -> OpenAIEvents:
    return OpenAIEvents(options, CompletionEvents, event_head(options, KIND) + b',"choices":[]')


def _whole(options: ResponseOptions, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    shown = [_choice(options, index, choice) for index, choice in enumerate(choices)]
    return encode(
        CompletionAnswer(
            options.answer_id,
            KIND,
            options.created,
            options.model,
            shown,
            usage_info(usage),
            **server_fields(options),
            kv_transfer_params=raw_object(choices[0].kv_transfer_params),
        )
    )


def _choice(options: ResponseOptions, index: int, choice: FinishedChoice) -> CompletionChoice:
    text, tokens, first_token = "".join(part.text for part in choice.parts), choice.logprobs, None
    if choice.echo is not None:
        text = choice.echo.text + text
        tokens, first_token = [*choice.echo.logprobs, *tokens], choice.echo.first_token
    offsets = TextOffsets(options.tokens_as_ids)
    return CompletionChoice(
        index,
        text,
        completion_logprobs(tokens, options.num_top, offsets, text, first_token) if options.logprobs else None,
        FINISH_REASONS[choice.finish],
        choice.stop_reason,
        shown_prompt_logprobs(options, choice.prompt_logprobs),
        choice.output_ids,
        choice.prompt_ids,
        choice.prompt_text,
    )


COMPLETIONS = Api(
    name="completions",
    paths=("/v1/completions",),
    schema=CompletionRequest,
    parse=parse_completion,
    events=_events,
    whole=_whole,
    error_body=error_body,
)
