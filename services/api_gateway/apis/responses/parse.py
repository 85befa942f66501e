"""From the fields of /v1/responses to a `GenerateRequest`."""

import time
from dataclasses import replace
from typing import Any

import msgspec

from blockyard.services.api_gateway.apis.responses.input_items import read_input
from blockyard.services.api_gateway.apis.responses.schemas import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    ResponsesRequest,
    TextFormat,
    check_fields,
    generation_fields,
)
from blockyard.services.api_gateway.apis.responses.stored_items import (
    GATEWAY_CHARS,
    RESPONSE_ID,
    read_history,
    stored_input,
    with_items,
)
from blockyard.services.api_gateway.apis.responses.tools import SEARCH, ResponseTools, ToolKey, read_response_tools
from blockyard.services.api_gateway.requests.generate_request import (
    MAX_ID_CHARS,
    GenerateRequest,
    ResponseOptions,
    ResponsesOptions,
    StoredTurn,
    StoreOptions,
)
from blockyard.services.api_gateway.requests.prompt_fields import messages_prompt, says_no_thinking, template_kwargs
from blockyard.services.api_gateway.requests.schemas import GenerationFields
from blockyard.services.api_gateway.requests.validate import conversation_request
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.output_format import OutputFormats, read_output_form
from blockyard.shared.ring_client.request_fields.structured_outputs import FieldGrammar, json_grammar, read_grammar

AUTO_SHARE = 8  # `truncation: auto` leaves this part of the context to an answer without a limit


def parse_responses(
    request: ResponsesRequest, card: ModelCard, config: GatewayConfig, formats: OutputFormats, name: str
) -> GenerateRequest:
    """A response that is not stored. `name` is the unique part of its id, where the request has none.

    Raises RequestError.
    """
    return _parse(request, card, config, formats, name, None)


def parse_stored(
    request: ResponsesRequest,
    card: ModelCard,
    config: GatewayConfig,
    formats: OutputFormats,
    name: str,
    turn: StoredTurn,
) -> GenerateRequest:
    """A response that may be stored, and may continue another. Raises RequestError."""
    return _parse(request, card, config, formats, name, turn)


def _parse(
    request: ResponsesRequest,
    card: ModelCard,
    config: GatewayConfig,
    formats: OutputFormats,
    name: str,
    turn: StoredTurn | None,
) -> GenerateRequest:
    check_fields(request, turn)
    if turn is not None and turn.referenced and isinstance(request.input, list):
        request = msgspec.structs.replace(request, input=with_items(request.input, turn.referenced))
    settings, strict = card.settings, config.strict_fields
    history = read_history(turn.history) if turn is not None and turn.history else []
    asked = limits.max_tokens("max_output_tokens", request.max_output_tokens, None)
    tools = read_response_tools(request, history, settings.tools, strict)
    messages = read_input(request.input, history, request.instructions, tools, strict)
    kwargs = template_kwargs(card, _template_fields(request), request.chat_template_kwargs)
    prompt = msgspec.structs.replace(
        messages_prompt(card, messages, tools.use, kwargs),
        chat_template=request.chat_template,
        add_special_tokens=request.add_special_tokens,
    )
    fields, room = generation_fields(request), 0
    if request.truncation == "auto":
        room = _room(asked, card.max_model_len)
    grammar, options = _grammar(request, fields, card), _options(request, card, config, tools, name, turn)
    output, thinks = read_output_form(tools.use, formats), not says_no_thinking(kwargs)
    options = replace(
        options,
        has_reader=output is not None,
        custom_tools=tuple(one.tool.name for one in tools.offered if one.tool.kind == "custom"),
    )
    parsed = conversation_request(fields, options, card, prompt, asked, tools.use, output, formats, grammar, thinks)
    return replace(parsed, prompt_field="input", shortened_tokens=room, ignored=tuple(tools.ignored))


def _template_fields(request: ResponsesRequest) -> dict[str, Any]:
    return {
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "verbosity": None if request.text is None else request.text.verbosity,
    }


def _room(asked: int | None, context: int) -> int:
    """Returns the most tokens of a prompt that can be shortened. `asked` counts the answer's tokens."""
    return max(1, context - min(asked or context // AUTO_SHARE, context // 2))


def _grammar(request: ResponsesRequest, fields: GenerationFields, card: ModelCard) -> FieldGrammar | None:
    """The grammar of the answer's text. Raises RequestError."""
    defaults = card.settings.grammars
    asked, other = None if request.text is None else request.text.format, read_grammar(fields, defaults)
    if asked is None or asked.type == "text":
        return other
    if other is not None:
        raise RequestError(f"text.format and {other.field} both limit the answer: leave one of them out", other.field)
    if asked.type == "json_object":
        return json_grammar(None, defaults, "text.format")
    if asked.schema is None:
        raise RequestError("text.format of type json_schema needs a schema", "text.format.schema")
    return json_grammar(asked.schema, defaults, "text.format.schema")


def _options(
    request: ResponsesRequest,
    card: ModelCard,
    config: GatewayConfig,
    tools: ResponseTools,
    name: str,
    turn: StoredTurn | None,
) -> ResponseOptions:
    include, num_top = request.include or (), request.top_logprobs
    own = limits.name("request_id", request.request_id, MAX_ID_CHARS)
    store = None
    if turn is not None and request.store is not False:
        name, own = (f"{turn.name[:GATEWAY_CHARS]}_{own}" if own else turn.name), ""
        items = stored_input(request.input or "", name)
        store = StoreOptions(items, request.previous_response_id or "", bool(request.background))
    shown = limits.num_logprobs("top_logprobs", num_top, card.settings.max_logprobs, card.vocab_size)
    return ResponseOptions(
        answer_id=RESPONSE_ID + (own or name),
        created=int(time.time()),
        model=card.answer_name,
        role="assistant",
        stream=bool(request.stream),
        logprobs=LOGPROBS in include,
        num_top=shown or 0,
        tokens_as_ids=config.return_tokens_as_token_ids,
        prompt_tokens_details=True,
        responses=ResponsesOptions(
            _repeated(request, card, tools, store is not None),
            {one.tool.name: one.key for one in tools.offered if one.key.namespace},
            SEARCH if ToolKey("", SEARCH) in tools.names and tools.searches else "",
            ENCRYPTED_REASONING in include,
            store,
        ),
    )


class RepeatedFields(msgspec.Struct, frozen=True):
    """Fields of the request that its answer repeats, with the values that hold."""

    instructions: str | None
    metadata: dict[str, str]
    tools: list[Any]
    tool_choice: Any
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: int
    max_output_tokens: int | None
    max_tool_calls: int | None
    reasoning: dict[str, Any]
    text: dict[str, Any]
    truncation: str
    user: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    background: bool
    previous_response_id: str | None
    store: bool
    service_tier: str = "default"


def _repeated(request: ResponsesRequest, card: ModelCard, tools: ResponseTools, stores: bool) -> bytes:
    """JSON fields without the braces around them."""
    defaults, text, reasoning = card.settings.defaults, request.text, request.reasoning
    shown_format = (text.format if text is not None else None) or TextFormat(type="text")
    summary = None if reasoning is None else reasoning.summary
    fields = RepeatedFields(
        request.instructions,
        request.metadata or {},
        tools.given,
        "auto" if request.tool_choice is None else request.tool_choice,
        request.parallel_tool_calls is not False,
        defaults.temperature if request.temperature is None else request.temperature,
        defaults.top_p if request.top_p is None else request.top_p,
        request.top_logprobs or 0,
        request.max_output_tokens,
        request.max_tool_calls,
        {"effort": None if reasoning is None else reasoning.effort, "summary": summary},
        {
            "format": {k: v for k, v in msgspec.structs.asdict(shown_format).items() if v is not None},
            "verbosity": None if text is None else text.verbosity,
        },
        request.truncation or "disabled",
        request.user,
        request.prompt_cache_key,
        request.safety_identifier,
        bool(request.background),
        request.previous_response_id,
        stores,
    )
    return msgspec.json.encode(fields)[1:-1]
