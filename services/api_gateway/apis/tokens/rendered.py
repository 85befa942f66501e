"""A request of another API as /inference/v1/generate takes it: with token ids, and with defaults filled in."""

from typing import Any

import msgspec

from blockyard.services.api_gateway.requests.generate_request import GenerateRequest
from blockyard.services.api_gateway.requests.schemas import StreamOptions
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Grammar, GrammarKind, Sampling, Tokenized
from blockyard.shared.ring_client.request_fields.chat_messages import NULL
from blockyard.shared.token_ids import unpack

ROLES = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.LARK: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}
COPIED = (  # fields that have their name in `Sampling`
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
)


class RenderedRequest(msgspec.Struct, frozen=True):
    request_id: str
    model: str
    token_ids: list[int]
    prompt_text: str
    token_offsets: list[tuple[int, int]] | None
    assistant_tokens_mask: list[int] | None
    features: None
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: msgspec.Raw
    reasoning_ended: bool | None
    grammar_markers: list[str] | None = None
    grammar_inner_end: str | None = None


def check_can_be_rendered(request: GenerateRequest) -> None:
    """Raises RequestError for a request that no other server could answer by its ids and sampling parameters."""
    if request.choices.beam is not None:
        raise RequestError("a beam search cannot be rendered", "use_beam_search")
    if request.choices.computed > request.choices.returned:
        raise RequestError("best_of cannot be rendered: send n, and choose among the answers", "best_of")


def rendered(request: GenerateRequest, index: int, prompt: Tokenized, sampling: Sampling) -> RenderedRequest:
    """`index`: of the request's prompts. `sampling` is the final one, as the ring would get it."""
    options, constraint = request.options, sampling.constraint
    grammar = None if constraint is None else constraint.grammar
    budget = request.thinking_budget
    if constraint is not None:
        budget = constraint.budget if constraint.begin_after else None
    inner_end = request.prompts[index].inner_end if constraint is not None and constraint.inner_end is not None else ""
    several = f"-{index}" if len(request.prompts) > 1 else ""
    return RenderedRequest(
        options.answer_id + several,
        options.model,
        unpack(prompt.token_ids),
        prompt.text or request.prompts[index].text or "",
        _offsets(prompt),
        list(prompt.assistant_mask) or None,
        None,
        _sampling_params(request, index, sampling, grammar, budget),
        options.stream,
        _stream_options(request),
        request.cache_salt or None,
        request.priority,
        msgspec.Raw(request.kv_transfer_params or bytes(NULL)),
        True if constraint is not None and grammar is not None and not constraint.begin_after else None,
        None if grammar is None or not grammar.markers else grammar.markers,
        inner_end or None,
    )


def _offsets(prompt: Tokenized) -> list[tuple[int, int]] | None:
    numbers = unpack(prompt.offsets)
    return list(zip(numbers[::2], numbers[1::2], strict=True)) or None


def _stream_options(request: GenerateRequest) -> StreamOptions | None:
    options = request.options
    if not options.stream or not (options.include_usage or options.continuous_usage):
        return None
    return StreamOptions(include_usage=options.include_usage, continuous_usage_stats=options.continuous_usage)


def _sampling_params(
    request: GenerateRequest, index: int, sampling: Sampling, grammar: Grammar | None, budget: int | None
) -> dict[str, Any]:
    text, repetition = request.text, request.text.repetition
    own = request.card.settings.logits_processors
    processors = [
        {"qualname": one.name, "args": _json(one.args, []), "kwargs": _json(one.kwargs, {})}
        for one in sampling.logits_processors[len(own) :]
    ]
    return {
        "n": request.choices.returned,
        **{name: getattr(sampling, name) for name in COPIED},
        "seed": request.seed,
        "stop": text.stop,
        "include_stop_str_in_output": text.include_stop,
        "skip_special_tokens": text.skip_special_tokens,
        "spaces_between_special_tokens": text.spaces_between_special_tokens,
        "logprobs": sampling.num_logprobs,
        "prompt_logprobs": sampling.num_prompt_logprobs,
        "logprob_token_ids": sampling.logprob_token_ids or None,
        "bad_words": request.prompts[index].bad_words,
        "allowed_token_ids": sampling.allowed_token_ids or None,
        "logit_bias": {str(token): value for token, value in sampling.logit_bias} or None,
        "structured_outputs": None if grammar is None else _structured_outputs(grammar),
        "thinking_token_budget": budget,
        "repetition_detection": None if repetition is None else _fields(repetition),
        "logits_processors": processors or None,
        "extra_args": _json(sampling.extra_args, None),
    }


def _structured_outputs(grammar: Grammar) -> dict[str, Any]:
    """vLLM's StructuredOutputsParams. `grammar` is that of the request; an engine was chosen if it names one."""
    if grammar.kind == GrammarKind.JSON_OBJECT:
        source: dict[str, Any] = {"json_object": True}
    elif grammar.kind == GrammarKind.CHOICE:
        source = {"choice": msgspec.json.decode(grammar.source)}
    else:
        source = {ROLES[grammar.kind]: grammar.source}
    return source | {
        "whitespace_pattern": grammar.whitespace_pattern or None,
        "disable_any_whitespace": not grammar.any_whitespace,
        "disable_additional_properties": not grammar.additional_properties,
        "backend": grammar.engine.value,
    }


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _json(data: bytes, default: Any) -> Any:
    return msgspec.json.decode(data) if data else default
