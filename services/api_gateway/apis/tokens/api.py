"""Answers of /inference/v1/generate: token ids, with log-probabilities that name tokens by their ids."""

from collections.abc import Callable, Sequence

import msgspec

from blockyard.services.api_gateway.apis.interface import Api, EventFields, FinishedChoice, Usage
from blockyard.services.api_gateway.apis.logprobs import ChatLogprobs, chat_logprobs, floored
from blockyard.services.api_gateway.apis.openai_fields import (
    DONE,
    FINISH_REASONS,
    PromptLogprobs,
    UsageInfo,
    encode,
    error_body,
    raw_object,
    shown_prompt_logprobs,
    usage_info,
)
from blockyard.services.api_gateway.apis.tokens.parse import parse_tokens
from blockyard.services.api_gateway.apis.tokens.schemas import OutputMode, TokensRequest
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions, TokensOptions
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import TextLogprobs
from blockyard.shared.output_parsing.parts import Part

PATH = "/inference/v1/generate"


class IdLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    rank: int | None = None  # None: of a token that was asked for by its id


class SampledLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[IdLogprob]


class IdLogprobs(msgspec.Struct, frozen=True):
    content: list[SampledLogprob]


class TokensChoice(msgspec.Struct, frozen=True):
    """Of an answer, and of an event, which has the ids and text since the last event."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: IdLogprobs | ChatLogprobs | None


class TextChoice(msgspec.Struct, frozen=True):
    """As `TokensChoice`, with the text."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: IdLogprobs | ChatLogprobs | None
    text: str


class TokensAnswer(msgspec.Struct, frozen=True):
    request_id: str
    model: str
    created: int
    output_mode: OutputMode
    choices: list[TokensChoice | TextChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: msgspec.Raw


class TokensEvent(msgspec.Struct, frozen=True):
    request_id: str
    output_mode: OutputMode
    choices: list[TokensChoice | TextChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None


class TokensChoiceEvents:
    """The events of one choice. Its first one has the prompt's ids."""

    same_around_text = None

    def __init__(self, options: ResponseOptions, index: int, prompt_ids: list[int] | None) -> None:
        self._options, self._index = options, index
        self._prompt_ids = prompt_ids if _own(options).shows_prompt_ids else None

    def around_text(self, text: str, stamp_s: float | None) -> tuple[bytes, bytes] | None:
        return None  # each event has its ids

    def opening(self, usage: Usage | None) -> bytes:
        return b""

    def event(self, part: Part | None, fields: EventFields) -> bytes:
        text = "" if part is None else part.text
        finish = None if fields.finish is None else FINISH_REASONS[fields.finish]
        ids, logprobs = fields.token_ids or [], _logprobs(self._options, fields.logprobs)
        choice = _choice(self._options, self._index, finish, fields.stop_reason, ids, logprobs, text)
        usage = None if fields.usage is None else usage_info(fields.usage)
        prompt_ids, self._prompt_ids = self._prompt_ids, None
        return _event(self._options, [choice], usage, prompt_ids)


class TokensEvents:
    def __init__(self, options: ResponseOptions) -> None:
        self._options = options

    def choice(self, index: int, prompt_ids: list[int] | None, prompt_text: str | None = None) -> TokensChoiceEvents:
        return TokensChoiceEvents(self._options, index, prompt_ids)

    def ending(self, usage: Callable[[], Usage]) -> bytes:
        if not self._options.include_usage:
            return DONE
        return _event(self._options, [], usage_info(usage()), None) + DONE

    def failed(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"


def _own(options: ResponseOptions) -> TokensOptions:
    assert options.tokens is not None
    return options.tokens


def _mode(options: ResponseOptions) -> OutputMode:
    return "text" if _own(options).shows_text else "tokens"


def _event(
    options: ResponseOptions,
    choices: list[TokensChoice | TextChoice],
    usage: UsageInfo | None,
    prompt_ids: list[int] | None,
) -> bytes:
    return b"data: %b\n\n" % encode(TokensEvent(options.answer_id, _mode(options), choices, usage, prompt_ids))


def _choice(
    options: ResponseOptions,
    index: int,
    finish: str | None,
    stop_reason: int | str | None,
    token_ids: list[int],
    logprobs: IdLogprobs | ChatLogprobs | None,
    text: str,
) -> TokensChoice | TextChoice:
    if _own(options).shows_text:
        return TextChoice(index, finish, stop_reason, token_ids, logprobs, text)
    return TokensChoice(index, finish, stop_reason, token_ids, logprobs)


def _logprobs(options: ResponseOptions, tokens: list[TextLogprobs] | None) -> IdLogprobs | ChatLogprobs | None:
    if tokens is None:
        return None
    if _own(options).shows_text:
        return chat_logprobs(tokens, options.num_top)
    return IdLogprobs([_sampled(token, options) for token in tokens])


def _sampled(token: TextLogprobs, options: ResponseOptions) -> SampledLogprob:
    """The sampled token comes first among its candidates, as in vLLM."""
    chosen = IdLogprob(token.token_id, floored(token.logprob), token.rank)
    candidates = zip(token.top_ids[: options.num_top], token.top_logprobs, strict=False)
    others = [
        IdLogprob(token_id, floored(logprob), None if options.listed_logprobs else rank)
        for rank, (token_id, logprob) in enumerate(candidates, start=1)
        if token_id != token.token_id
    ]
    return SampledLogprob(chosen.token_id, chosen.logprob, chosen.rank, [chosen, *others])


def _whole(options: ResponseOptions, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    first = choices[0]
    return encode(
        TokensAnswer(
            options.answer_id,
            options.model,
            options.created,
            _mode(options),
            [_finished(options, index, choice) for index, choice in enumerate(choices)],
            usage_info(usage),
            shown_prompt_logprobs(options, first.prompt_logprobs),
            first.prompt_ids if _own(options).shows_prompt_ids else None,
            raw_object(first.kv_transfer_params),
        )
    )


def _finished(options: ResponseOptions, index: int, choice: FinishedChoice) -> TokensChoice | TextChoice:
    logprobs = _logprobs(options, choice.logprobs if options.logprobs else None)
    text = "".join(part.text for part in choice.parts)
    finish = FINISH_REASONS[choice.finish]
    return _choice(options, index, finish, choice.stop_reason, choice.output_ids or [], logprobs, text)


TOKENS = Api(
    name="tokens",
    paths=(PATH,),
    schema=TokensRequest,
    parse=parse_tokens,
    events=TokensEvents,
    whole=_whole,
    error_body=error_body,
    scale_out=True,
)
