"""Answers that are not streamed: collects the choices' text and encodes OpenAI's response objects."""

import msgspec

from blockyard.services.api_gateway.responses.http_generation import Echo, HttpGeneration, UsageInfo, without_output
from blockyard.services.api_gateway.responses.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptToken,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from blockyard.shared.messages import FinishReason, TextDelta, TextLogprobs
from blockyard.shared.ring_client.journal import ChoiceLog, JournalEntry
from blockyard.shared.ring_client.metrics.meters import REASONS
from blockyard.shared.ring_client.request_fields.choices import best
from blockyard.shared.token_ids import unpack

PromptLogprobs = list[dict[int, PromptToken] | None]


class AnswerMessage(msgspec.Struct, frozen=True):
    """With the empty fields that clients read in every message."""

    role: str
    content: str
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[None] = []
    reasoning: None = None
    reasoning_content: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatAnswer(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None


class CompletionAnswer(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None


class CollectedChoice:
    """A journal sink that keeps everything until the answer is complete."""

    def __init__(self, no_output: bool) -> None:
        self._no_output = no_output
        self.text: list[str] = []
        self.logprobs: list[TextLogprobs] = []
        self.finish = FinishReason.FAILED
        self.stop_reason: int | str | None = None
        self.echo: Echo | None = None

    def prepend(self, echo: Echo) -> None:
        """The answer begins with the prompt's text."""
        self.echo = echo

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        if self._no_output:
            delta = without_output(delta)
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason


def encode_full_response(generation: HttpGeneration) -> bytes:
    """The body of a finished generation. Its sinks must be `CollectedChoice`."""
    options, count = generation.request.options, generation.request.choices.returned
    collected = [(entry, *pair) for entry in generation.entries for pair in _best(entry, count)]
    if not options.chat:
        choices = [_completion_choice(generation, i, *one) for i, one in enumerate(collected)]
        return msgspec.json.encode(
            CompletionAnswer(
                options.answer_id, "text_completion", options.created, options.model, choices, generation.usage()
            )
        )
    entry = generation.entries[0]
    chat_choices = [_chat_choice(generation, i, *one) for i, one in enumerate(collected)]
    return msgspec.json.encode(
        ChatAnswer(
            options.answer_id,
            "chat.completion",
            options.created,
            options.model,
            chat_choices,
            generation.usage(),
            _prompt_logprobs(generation, entry),
            unpack(entry.request.prompt_ids) if options.token_ids else None,
        )
    )


def _best(entry: JournalEntry, count: int) -> list[tuple[ChoiceLog, CollectedChoice]]:
    pairs = [(choice, choice.sink) for choice in entry.choices if isinstance(choice.sink, CollectedChoice)]
    return best(pairs, [sink.logprobs for _, sink in pairs], count)


def _chat_choice(
    generation: HttpGeneration, index: int, entry: JournalEntry, choice: ChoiceLog, sink: CollectedChoice
) -> ChatChoice:
    options = generation.request.options
    return ChatChoice(
        index,
        AnswerMessage(options.role, "".join(sink.text)),
        chat_logprobs(sink.logprobs, options.num_top) if options.logprobs else None,
        REASONS[sink.finish],
        sink.stop_reason,
        choice.output_ids.tolist() if options.token_ids else None,
    )


def _completion_choice(
    generation: HttpGeneration, index: int, entry: JournalEntry, choice: ChoiceLog, sink: CollectedChoice
) -> CompletionChoice:
    options, text, tokens, first_token = generation.request.options, "".join(sink.text), sink.logprobs, None
    if sink.echo is not None:
        text = sink.echo.text + text
        tokens, first_token = [*sink.echo.logprobs, *tokens], sink.echo.first_token
    output_ids = [] if options.no_output else choice.output_ids.tolist()
    return CompletionChoice(
        index,
        text,
        completion_logprobs(tokens, options.num_top, 0, first_token) if options.logprobs else None,
        REASONS[sink.finish],
        sink.stop_reason,
        _prompt_logprobs(generation, entry),
        output_ids if options.token_ids else None,
        unpack(entry.request.prompt_ids) if options.token_ids else None,
    )


def _prompt_logprobs(generation: HttpGeneration, entry: JournalEntry) -> PromptLogprobs | None:
    num_top = generation.request.options.prompt_logprobs
    return None if num_top is None else prompt_logprobs(entry.prompt_logprobs, num_top)
