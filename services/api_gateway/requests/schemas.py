"""What the endpoints accept: a wrong type is a 400 that names the field; an unknown field is ignored and named.

Fields typed `Raw` are known and not read. Most have no effect on an answer. Those in `NOT_BUILT` would have one and
are refused, unless they hold one of the listed values, which ask for nothing.
"""

import codecs
from typing import Any, TypeVar

import msgspec

from blockyard.services.api_gateway.requests.decode_errors import byte_offset, field_before, invalid
from blockyard.services.api_gateway.responses.error_body import ApiError
from blockyard.shared.errors import not_built
from blockyard.shared.ring_client.chat_messages import NULL, Message
from blockyard.shared.ring_client.known_fields import decode_known

# field -> values that ask for nothing; null is always one
NOT_BUILT: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "repetition_detection": (),
    "truncation_side": ("left",),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "prompt_embeds": ([],),
    "return_prompt_text": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "suffix": ("",),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What /v1/completions and /v1/chat/completions have in common."""

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
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_stamps: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    # no effect on an answer
    metadata: msgspec.Raw = NULL
    store: msgspec.Raw = NULL
    service_tier: msgspec.Raw = NULL
    safety_identifier: msgspec.Raw = NULL
    prompt_cache_key: msgspec.Raw = NULL
    prompt_cache_retention: msgspec.Raw = NULL
    # refused by name
    response_format: msgspec.Raw = NULL
    guided_json: msgspec.Raw = NULL
    guided_regex: msgspec.Raw = NULL
    guided_choice: msgspec.Raw = NULL
    guided_grammar: msgspec.Raw = NULL
    structured_outputs: msgspec.Raw = NULL
    logits_processors: msgspec.Raw = NULL
    logprob_token_ids: msgspec.Raw = NULL
    repetition_detection: msgspec.Raw = NULL
    truncation_side: msgspec.Raw = NULL
    thinking_token_budget: msgspec.Raw = NULL
    mm_processor_kwargs: msgspec.Raw = NULL
    kv_transfer_params: msgspec.Raw = NULL
    vllm_xargs: msgspec.Raw = NULL


class CompletionRequest(GenerationFields):
    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    # refused by name
    suffix: msgspec.Raw = NULL
    prompt_embeds: msgspec.Raw = NULL


class ChatRequest(GenerationFields):
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
    # no effect on an answer
    parallel_tool_calls: msgspec.Raw = NULL
    prediction: msgspec.Raw = NULL
    include_reasoning: msgspec.Raw = NULL
    # refused by name
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    functions: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    modalities: msgspec.Raw = NULL
    audio: msgspec.Raw = NULL
    reasoning_effort: msgspec.Raw = NULL
    verbosity: msgspec.Raw = NULL
    web_search_options: msgspec.Raw = NULL
    media_io_kwargs: msgspec.Raw = NULL
    return_prompt_text: msgspec.Raw = NULL


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


T = TypeVar("T", bound=msgspec.Struct)


def decode(body: bytes, kind: type[T], strict: bool = False) -> tuple[T, list[str]]:
    """The request in `body`, and the names of unknown fields that were ignored; with `strict` they are an error.

    Raises ApiError naming the field, as far as one can be named.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    ignored: list[str]
    try:
        body.decode("utf-8")
        request, ignored = decode_known(body, kind, strict)
    except UnicodeDecodeError as e:
        raise ApiError(f"the body is not valid UTF-8: {e.reason} at byte {e.start}", field_before(body, e.start)) from e
    except RecursionError as e:
        raise ApiError("the body is nested too deeply") from e
    except msgspec.ValidationError as e:
        raise invalid(str(e)) from e
    except msgspec.DecodeError as e:
        at = byte_offset(str(e))
        field = "" if at is None else field_before(body, at)
        raise ApiError(f"the body is not valid JSON: {e}" + (f", in `{field}`" if field else ""), field) from e
    _refuse_unbuilt(request)
    return request, ignored


def _refuse_unbuilt(request: msgspec.Struct) -> None:
    for name in NOT_BUILT.keys() & set(request.__struct_fields__):
        value = msgspec.json.decode(getattr(request, name))
        if isinstance(value, dict):  # a client's empty fields ask for nothing either
            value = {key: item for key, item in value.items() if item is not None}
        if value is not None and value not in NOT_BUILT[name]:
            raise not_built(name)
