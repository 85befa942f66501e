"""From the fields of /inference/v1/generate, a completion's under other names, to a `GenerateRequest`."""

from dataclasses import replace
from typing import Any, cast

import msgspec

from blockyard.services.api_gateway.apis.tokens.schemas import SamplingFields, TokensRequest
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest, TokensOptions
from blockyard.services.api_gateway.requests.schemas import CompletionRequest
from blockyard.services.api_gateway.requests.validate import completion_request
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard
from blockyard.shared.ring_client.request_fields.known_fields import read_raw
from blockyard.shared.ring_client.request_fields.limits import UNLIMITED
from blockyard.shared.ring_client.request_fields.output_format import OutputFormats
from blockyard.shared.ring_client.request_fields.structured_outputs import FieldGrammar, read_grammar

PREFIX = "generate-tokens-"
CONNECTOR = "kv_transfer_params"  # also in `extra_args`, as vLLM's engine has it
SAME = tuple({*SamplingFields.__struct_fields__} & {*CompletionRequest.__struct_fields__})
OWN_NAMES = {"prompt": "token_ids", "vllm_xargs": "sampling_params.extra_args"}  # of fields of a completion


def parse_tokens(
    request: TokensRequest, card: ModelCard, config: GatewayConfig, _formats: OutputFormats, name: str
) -> GenerateRequest:
    """`name` is the unique part of the answer's id, where the request has none. Raises RequestError."""
    try:
        completion = _completion(request)
        grammar = _grammar(request, completion, card)
        parsed = completion_request(completion, card, config, name, grammar, PREFIX)
    except RequestError as e:
        e.field = _own_name(e.field)
        raise
    own = TokensOptions(request.output_mode == "text", bool(request.return_token_ids))
    return replace(
        parsed,
        options=replace(parsed.options, token_ids=True, tokens=own),
        prompt_field="token_ids",
        calls_are_forced=request.grammar_inner_end is not None,
    )


def _completion(request: TokensRequest) -> CompletionRequest:
    """The completion that asks for the same tokens."""
    asked = request.sampling_params
    fields: dict[str, Any] = {name: getattr(asked, name) for name in SAME}
    if asked.max_tokens is None:
        fields["max_tokens"] = UNLIMITED
    if asked.logprob_token_ids is not None and asked.logprobs is None:
        fields["logprobs"] = 0
    xargs, connector = read_raw(asked.extra_args, "extra_args"), request.kv_transfer_params
    if isinstance(xargs, dict) and CONNECTOR in xargs:
        connector = msgspec.Raw(msgspec.json.encode(xargs.pop(CONNECTOR)))
    if xargs:
        fields["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(xargs))
    return CompletionRequest(
        prompt=cast(list[str | int | list[int]], request.token_ids),
        model=request.model,
        stream=request.stream,
        stream_options=request.stream_options,
        priority=request.priority,
        cache_salt=request.cache_salt,
        request_id=request.request_id,
        kv_transfer_params=connector,
        **fields,
    )


def _grammar(request: TokensRequest, completion: CompletionRequest, card: ModelCard) -> FieldGrammar | None:
    found = read_grammar(completion, card.settings.grammars)
    if found is None:
        return None
    grammar = msgspec.structs.replace(found.grammar, markers=request.grammar_markers or [])
    return replace(
        found,
        grammar=grammar,
        allows_reasoning=bool(request.reasoning_ended),
        inner_end=request.grammar_inner_end or "",
    )


def _own_name(field: str) -> str:
    """The name of a completion's field in this API."""
    first, dot, rest = field.partition(".")
    base, bracket, index = first.partition("[")
    if base in OWN_NAMES:
        return OWN_NAMES[base] + bracket + index + dot + rest
    return f"sampling_params.{field}" if base in SamplingFields.__struct_fields__ else field
