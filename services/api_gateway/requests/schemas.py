"""The JSON fields of each endpoint. A wrong type is a 400 that names the field; an unknown field is ignored.

Fields typed `Raw` are known and not read. Most have no effect on an answer. Fields in `NOT_BUILT` would have an effect
and are refused, unless they hold one of the listed values, which change nothing.
"""

import codecs
import json
from typing import Any, Literal, TypeVar

import msgspec

from blockyard.shared.errors import RequestError, not_built, shortened
from blockyard.shared.ring_client.request_fields.chat_messages import NULL, Message
from blockyard.shared.ring_client.request_fields.engine_fields import RepetitionDetectionParams
from blockyard.shared.ring_client.request_fields.known_fields import decode_known, read_raw

# field -> values that change nothing; null is always one
NOT_BUILT: dict[str, tuple[object, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "prompt_embeds": ([],),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "images": ([],),
    "rank_fields": ([], ["text"]),
    "data": (),
    # of /v1/messages and /inference/v1/generate
    "container": ([], {}),
    "compaction": ([], {}),
    "mcp_servers": ([], {}),
    "thread": ([], {}),
    "features": ([], {}),
    "content_parts": ([], {}),
    "ec_transfer_params": ([], {}),
}


UNKNOWN, MISSING, AT = "unknown field `", "missing required field `", " - at `$"  # in msgspec's messages
MAX_CHARS = 300  # of a decoder's message in an answer; it holds the full name of an unknown field
MAX_KEY_BYTES = 300


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
TruncationSide = Literal["left", "right"]  # of the prompt, that is cut
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "standard_only"]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SharedSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters that APIs other than completions and chat completions have under the same names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None


def shared_sampling(request: SharedSampling) -> dict[str, Any]:
    """The parameters by their names, for `GenerationFields`."""
    return {name: getattr(request, name) for name in SharedSampling.__struct_fields__}


class GenerationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both /v1/completions and /v1/chat/completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_stamps: bool | None = None
    return_prompt_text: bool | None = None
    return_token_offsets: bool | None = None  # of a request that is rendered
    service_tier: ServiceTier | None = None  # there is one, which answers name
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    # no effect on an answer
    metadata: msgspec.Raw = NULL
    store: msgspec.Raw = NULL
    safety_identifier: msgspec.Raw = NULL
    prompt_cache_key: msgspec.Raw = NULL
    prompt_cache_retention: msgspec.Raw = NULL
    prompt_cache_options: msgspec.Raw = NULL
    logits_processors: msgspec.Raw = NULL
    # structured output
    response_format: msgspec.Raw = NULL
    structured_outputs: msgspec.Raw = NULL
    guided_json: msgspec.Raw = NULL
    guided_regex: msgspec.Raw = NULL
    guided_choice: msgspec.Raw = NULL
    guided_grammar: msgspec.Raw = NULL
    guided_json_object: msgspec.Raw = NULL
    guided_whitespace_pattern: msgspec.Raw = NULL
    guided_decoding_backend: msgspec.Raw = NULL
    thinking_token_budget: int | None = None
    # for parts of the engine
    logprob_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    kv_transfer_params: msgspec.Raw = NULL
    vllm_xargs: msgspec.Raw = NULL
    # refused by name
    mm_processor_kwargs: msgspec.Raw = NULL


class CompletionRequest(GenerationFields):
    """Continues prompts."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    # refused by name
    prompt_embeds: msgspec.Raw = NULL


class ChatRequest(GenerationFields):
    """Answers a conversation."""

    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    return_assistant_tokens_mask: bool | None = None  # of a request that is rendered
    suffix: str | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    include_reasoning: bool | None = None
    # tools
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    parallel_tool_calls: bool | None = None
    functions: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    # no effect on an answer
    prediction: msgspec.Raw = NULL
    # refused by name
    modalities: msgspec.Raw = NULL
    audio: msgspec.Raw = NULL
    web_search_options: msgspec.Raw = NULL
    moderation: msgspec.Raw = NULL
    media_io_kwargs: msgspec.Raw = NULL


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The token ids of a prompt or of messages: one of the two fields."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: msgspec.Raw = NULL


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The text of token ids."""

    model: str | None = None
    tokens: list[int]


T = TypeVar("T", bound=msgspec.Struct)


def decode(body: bytes, kind: type[T], strict: bool = False) -> tuple[T, list[str]]:
    """The request in `body`, and the names of its unknown fields. With `strict` an unknown field is an error.

    Raises RequestError, with the field's name where it can be found.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    ignored: list[str]
    try:
        body.decode("utf-8")
        request, ignored = decode_known(body, kind, strict)
    except UnicodeDecodeError as e:
        raise RequestError(
            f"the body is not valid UTF-8: {e.reason} at byte {e.start}", field_before(body, e.start)
        ) from e
    except RecursionError as e:
        raise RequestError("the body is nested too deeply") from e
    except msgspec.ValidationError as e:
        raise _invalid(str(e)) from e
    except msgspec.DecodeError as e:
        if (half := half_surrogate(body)) is not None:
            raise RequestError(f"`{half}` has half of a surrogate pair, which is no character", half) from e
        at = _byte_offset(str(e))
        field = "" if at is None else field_before(body, at)
        raise RequestError(f"the body is not valid JSON: {e}" + (f", in `{field}`" if field else ""), field) from e
    _refuse_unbuilt(request)
    return request, ignored


def _refuse_unbuilt(request: msgspec.Struct) -> None:
    for name in NOT_BUILT.keys() & set(request.__struct_fields__):
        value = read_raw(getattr(request, name), name)
        if isinstance(value, dict):  # empty fields of a client's object change nothing either
            value = {key: item for key, item in value.items() if item is not None}
        if value is not None and value not in NOT_BUILT[name]:
            raise not_built(name)


def _invalid(text: str) -> RequestError:
    """The error for JSON that does not match the request's type. `text` is msgspec's message.

    The message and the body come from the client. Plain string searches are linear in their length; a regular
    expression may not be.
    """
    said, at, path = text.rpartition(AT)
    if not at or not path.endswith("`"):
        said, path = text, ""
    field = path.removesuffix("`").removeprefix(".")
    for before in (UNKNOWN, MISSING):
        _, found, name = said.partition(before)
        if found:
            name = name.removesuffix("`")
            field = f"{field}.{name}" if field else name
    return RequestError(shortened(text, MAX_CHARS).replace("`$.", "`"), shortened(field, MAX_CHARS))


def half_surrogate(body: bytes) -> str | None:
    """The path of the first text with half of a surrogate pair, which the decoder takes for a cut body; None: none."""
    if b"\\u" not in body:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return _half_in(value, "")


def _half_in(value: object, where: str) -> str | None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return where
    elif isinstance(value, list):
        return next((at for i, one in enumerate(value) if (at := _half_in(one, f"{where}[{i}]")) is not None), None)
    elif isinstance(value, dict):
        for name, one in value.items():
            if (at := _half_in(one, f"{where}.{name}" if where else name)) is not None:
                return at
    return None


def _byte_offset(text: str) -> int | None:
    """The number in `(byte 17)` of msgspec's message about malformed JSON."""
    number = text.rpartition("(byte ")[2].partition(")")[0]
    return int(number) if number.isascii() and number.isdigit() else None


def field_before(body: bytes, at: int) -> str:
    """Returns the key of the value that holds byte `at` of malformed JSON; "" if no key directly precedes it."""
    window = body[max(0, at - MAX_KEY_BYTES) : at]
    end = window.rfind(b'"')
    if end < 1 or not window[end + 1 :].lstrip().startswith(b":"):
        return ""
    start = window.rfind(b'"', 0, end)
    while start > 0 and _is_escaped(window, start):
        start = window.rfind(b'"', 0, start)
    return window[start + 1 : end].decode("utf-8", "replace") if start >= 0 else ""


def _is_escaped(text: bytes, at: int) -> bool:
    """True if an odd number of backslashes stands before byte `at`."""
    before = text[:at]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
