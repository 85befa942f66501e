"""The fields of /inference/v1/generate, in vLLM's names."""

from typing import Literal

import msgspec

from blockyard.services.api_gateway.requests.schemas import SharedSampling, StreamOptions
from blockyard.shared.ring_client.request_fields.chat_messages import NULL
from blockyard.shared.ring_client.request_fields.engine_fields import RepetitionDetectionParams

OutputMode = Literal["tokens", "text"]


class SamplingFields(SharedSampling):
    """vLLM's SamplingParams. A field that is left out has the model's default."""

    n: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    max_tokens: int | None = None  # None: as many as the context leaves
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: msgspec.Raw = NULL
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    logits_processors: msgspec.Raw = NULL
    extra_args: msgspec.Raw = NULL
    # no effect on an answer
    detokenize: msgspec.Raw = NULL
    flat_logprobs: msgspec.Raw = NULL
    output_kind: msgspec.Raw = NULL
    skip_clone: msgspec.Raw = NULL
    skip_reading_prefix_cache: msgspec.Raw = NULL


class TokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Continues a prompt of token ids; the answer has token ids."""

    request_id: str | None = None
    model: str | None = None
    token_ids: list[int]
    sampling_params: SamplingFields = msgspec.field(default_factory=SamplingFields)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: OutputMode | None = None  # text: the answer has its text, too
    return_token_ids: bool | None = None  # the answer has the prompt's ids, too
    cache_salt: str | None = None
    priority: int | None = None
    kv_transfer_params: msgspec.Raw = NULL
    # of a grammar
    reasoning_ended: bool | None = None  # it begins with the answer, whatever the prompt ends with
    grammar_markers: list[str] | None = None  # texts of its rules marker_0, marker_1, ...
    grammar_inner_end: str | None = None  # it forces calls, and has this token behind the reasoning in it
    # of a request that was rendered; no effect on an answer
    token_offsets: msgspec.Raw = NULL
    assistant_tokens_mask: msgspec.Raw = NULL
    prompt_text: msgspec.Raw = NULL
    reasoning_parser_kwargs: msgspec.Raw = NULL
    # refused by name
    features: msgspec.Raw = NULL
    content_parts: msgspec.Raw = NULL
    ec_transfer_params: msgspec.Raw = NULL
