"""Whole answers: what the choices collected, in OpenAI's shapes."""

import msgspec

from blockyard.services.api_gateway.responses.echo import Echo, without_output
from blockyard.services.api_gateway.responses.http_generation import Call, Usage
from blockyard.services.api_gateway.responses.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptToken,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from blockyard.shared.messages import FinishReason, TextDelta, TextLogprobs
from blockyard.shared.ring_client.choices import best
from blockyard.shared.ring_client.journal import ChoiceLog, Entry
from blockyard.shared.ring_client.meters import REASONS

PromptLogprobs = list[dict[int, PromptToken] | None]


class AnswerMessage(msgspec.Struct, frozen=True):
    """With the fields that clients read whether or not they were asked for."""

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
    usage: Usage
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
    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None


class Collected:
    """A journal sink that keeps everything until the answer is whole."""

    def __init__(self, no_output: bool) -> None:
        self._no_output = no_output
        self.text: list[str] = []
        self.logprobs: list[TextLogprobs] = []
        self.finish = FinishReason.FAILED
        self.stop_reason: int | str | None = None
        self.echo: Echo | None = None

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        if self._no_output:
            delta = without_output(delta)
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason


def ids_of(data: bytes) -> list[int]:
    return memoryview(data).cast("I").tolist()


def answer(call: Call) -> bytes:
    """The body of a finished call whose sinks are Collected."""
    shape = call.job.shape
    collected = [(entry, *pair) for entry in call.entries for pair in _best(entry, call.job.choices.returned)]
    if not shape.chat:
        choices = [_completion_choice(call, i, *one) for i, one in enumerate(collected)]
        return msgspec.json.encode(
            CompletionAnswer(shape.answer_id, "text_completion", shape.created, shape.model, choices, call.usage())
        )
    entry = call.entries[0]
    chat_choices = [_chat_choice(call, i, *one) for i, one in enumerate(collected)]
    return msgspec.json.encode(
        ChatAnswer(
            shape.answer_id,
            "chat.completion",
            shape.created,
            shape.model,
            chat_choices,
            call.usage(),
            _prompt_logprobs(call, entry),
            ids_of(entry.prompt_ids) if shape.token_ids else None,
        )
    )


def _best(entry: Entry, count: int) -> list[tuple[ChoiceLog, Collected]]:
    pairs = [(choice, choice.sink) for choice in entry.choices if isinstance(choice.sink, Collected)]
    return best(pairs, [sink.logprobs for _, sink in pairs], count)


def _chat_choice(call: Call, index: int, entry: Entry, choice: ChoiceLog, sink: Collected) -> ChatChoice:
    shape = call.job.shape
    return ChatChoice(
        index,
        AnswerMessage(shape.role, "".join(sink.text)),
        chat_logprobs(sink.logprobs, shape.num_top) if shape.logprobs else None,
        REASONS[sink.finish],
        sink.stop_reason,
        choice.output_ids.tolist() if shape.token_ids else None,
    )


def _completion_choice(call: Call, index: int, entry: Entry, choice: ChoiceLog, sink: Collected) -> CompletionChoice:
    shape, text, tokens, first_piece = call.job.shape, "".join(sink.text), sink.logprobs, None
    if sink.echo is not None:
        text = sink.echo.text + text
        tokens, first_piece = [*sink.echo.logprobs, *tokens], sink.echo.first_piece
    output_ids = [] if shape.no_output else choice.output_ids.tolist()
    return CompletionChoice(
        index,
        text,
        completion_logprobs(tokens, shape.num_top, 0, first_piece) if shape.logprobs else None,
        REASONS[sink.finish],
        sink.stop_reason,
        _prompt_logprobs(call, entry),
        output_ids if shape.token_ids else None,
        ids_of(entry.prompt_ids) if shape.token_ids else None,
    )


def _prompt_logprobs(call: Call, entry: Entry) -> PromptLogprobs | None:
    num_top = call.job.shape.prompt_logprobs
    return None if num_top is None else prompt_logprobs(entry.prompt_logprobs, num_top)
