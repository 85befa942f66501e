"""The JSON fields of /v1/responses. Items and tools are read by `input_items` and `tools`."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from blockyard.services.api_gateway.requests.generate_request import StoredTurn
from blockyard.services.api_gateway.requests.schemas import (
    GenerationFields,
    ReasoningEffort,
    SharedSampling,
    TruncationSide,
    Verbosity,
)
from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.ring_client.request_fields.chat_messages import NULL
from blockyard.shared.ring_client.request_fields.engine_fields import RepetitionDetectionParams

MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
# values of `include`; the others are of tools that this server does not run
INCLUDABLE = (
    LOGPROBS,
    ENCRYPTED_REASONING,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
# fields that need features that this server lacks -> the replacement that clients can send
REFUSED = {
    "conversation": "send previous_response_id, or the whole conversation as input",
    "moderation": "",
    "prompt": "send its text as instructions and input",
}
# fields of chat completions -> their replacements; not to be ignored, since an answer would be another one
OF_CHAT = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "n": "one request for each answer",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class ItemPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message, of the output of a call, or of reasoning."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    # no effect on an answer
    annotations: msgspec.Raw = NULL
    logprobs: msgspec.Raw = NULL
    parsed: msgspec.Raw = NULL
    prompt_cache_breakpoint: msgspec.Raw = NULL
    # of parts that are refused
    image_url: msgspec.Raw = NULL
    file_id: msgspec.Raw = NULL
    file_url: msgspec.Raw = NULL
    file_data: msgspec.Raw = NULL
    filename: msgspec.Raw = NULL
    detail: msgspec.Raw = NULL


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An item of the input, of any type. Clients send back items of earlier answers as they are."""

    type: str | None = None  # None: a message, or the id of an item alone
    id: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None  # JSON text, or its value
    input: str | None = None
    output: str | list[ItemPart] | dict[str, Any] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None
    tools: list[Any] | None = None
    execution: str | None = None
    # no effect on an answer
    status: msgspec.Raw = NULL
    phase: msgspec.Raw = NULL
    caller: msgspec.Raw = NULL
    is_async: msgspec.Raw = msgspec.field(default=NULL, name="async")
    created_by: msgspec.Raw = NULL
    parsed_arguments: msgspec.Raw = NULL
    internal_chat_message_metadata_passthrough: msgspec.Raw = NULL


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None  # no effect: every schema is enforced
    description: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: ReasoningEffort | None = None
    # no effect on an answer: reasoning is shown as the model writes it
    summary: str | None = None  # repeated in the answer
    generate_summary: msgspec.Raw = NULL
    context: msgspec.Raw = NULL
    mode: msgspec.Raw = NULL


class ResponsesRequest(SharedSampling):
    """Answers a conversation of items, which may call tools. The answer is stored unless `store` is false."""

    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # sampling, as in chat completions
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    thinking_token_budget: int | None = None
    logits_processors: msgspec.Raw = NULL
    logprob_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    kv_transfer_params: msgspec.Raw = NULL
    vllm_xargs: msgspec.Raw = NULL
    return_token_offsets: bool | None = None  # of a request that is rendered
    structured_outputs: msgspec.Raw = NULL
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    # no effect on an answer
    access_programs: msgspec.Raw = NULL
    client_metadata: msgspec.Raw = NULL
    context_management: msgspec.Raw = NULL
    image: msgspec.Raw = NULL
    prompt_cache_options: msgspec.Raw = NULL
    prompt_cache_retention: msgspec.Raw = NULL
    service_tier: msgspec.Raw = NULL
    stream_options: msgspec.Raw = NULL
    personality: msgspec.Raw = NULL
    # refused by name
    conversation: msgspec.Raw = NULL
    moderation: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    mm_processor_kwargs: msgspec.Raw = NULL
    media_io_kwargs: msgspec.Raw = NULL
    # of chat completions, refused by name
    max_completion_tokens: msgspec.Raw = NULL
    max_tokens: msgspec.Raw = NULL
    messages: msgspec.Raw = NULL
    n: msgspec.Raw = NULL
    reasoning_effort: msgspec.Raw = NULL
    response_format: msgspec.Raw = NULL


# fields that mean the same in all APIs
_SHARED = (
    set(ResponsesRequest.__struct_fields__) & set(GenerationFields.__struct_fields__)
    - OF_CHAT.keys()
    - {"metadata", "store", "service_tier", "stream_options", "prompt_cache_key", "safety_identifier"}
)  # fmt: skip


def generation_fields(request: ResponsesRequest, **others: Any) -> GenerationFields:
    """The fields that all APIs have, with others that this one spells differently."""
    return GenerationFields(**{name: getattr(request, name) for name in _SHARED} | others)


def placed(history: Sequence[InputItem], given: str | list[InputItem] | None) -> Iterator[tuple[str, InputItem]]:
    """The items of a conversation in order, each with its place for errors."""
    for i, item in enumerate(history):
        yield f"previous_response_id[{i}]", item
    for i, item in enumerate(given if isinstance(given, list) else ()):
        yield f"input[{i}]", item


def check_fields(request: ResponsesRequest, turn: StoredTurn | None) -> None:
    """Raises RequestError for fields that are wrong whatever the conversation is."""
    _check_stored(request, turn)
    for name, instead in REFUSED.items():
        if bytes(getattr(request, name)) not in (b"null", b"false"):
            raise not_built(name, instead)
    for name, instead in OF_CHAT.items():
        if bytes(getattr(request, name)) not in (b"null", b"1" if name == "n" else b"null"):
            raise RequestError(f"{name} is a field of chat completions; /v1/responses has {instead}", name)
    for i, value in enumerate(request.include or ()):
        if value not in INCLUDABLE:
            raise RequestError(f"include has one of {', '.join(INCLUDABLE)}, got {value[:80]!r}", f"include[{i}]")
    if request.max_tool_calls is not None and request.max_tool_calls < 1:
        raise RequestError(f"max_tool_calls must be at least 1, got {request.max_tool_calls}", "max_tool_calls")
    _check_metadata(request.metadata or {})


def _check_stored(request: ResponsesRequest, turn: StoredTurn | None) -> None:
    if request.previous_response_id is not None and bytes(request.conversation) != b"null":
        raise RequestError(
            "previous_response_id and conversation exclude each other",
            "previous_response_id",
            code="mutually_exclusive_parameters",
        )
    needs = "previous_response_id" if request.previous_response_id is not None else ""
    needs = "background" if request.background else needs
    if needs and turn is None:
        said = f"{needs} needs stored responses: --max-stored-responses is 0, or this is a line of a batch"
        raise RequestError(said, needs, code="unsupported_parameter")
    if request.previous_response_id is not None and turn is not None and not turn.history:
        raise RequestError("the key previous_response_id is written as it is, without escapes", "previous_response_id")
    if request.background and request.store is False:
        raise RequestError("a background response is stored: store may not be false", "background")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise RequestError(f"metadata has at most {MAX_METADATA} entries, got {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise RequestError(
                f"keys of metadata have at most {MAX_KEY_CHARS} characters and values {MAX_VALUE_CHARS}",
                f"metadata.{key[:MAX_KEY_CHARS]}",
            )
