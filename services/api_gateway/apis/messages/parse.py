"""From the fields of /v1/messages to a `GenerateRequest`."""

import time
from dataclasses import replace
from typing import Any

import msgspec

from blockyard.services.api_gateway.apis.messages.conversation import read_conversation
from blockyard.services.api_gateway.apis.messages.schemas import MessagesRequest
from blockyard.services.api_gateway.apis.messages.tools import read_offered_tools
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest, MessagesOptions, ResponseOptions
from blockyard.services.api_gateway.requests.prompt_fields import REASONING_SWITCHES, messages_prompt, template_kwargs
from blockyard.services.api_gateway.requests.schemas import GenerationFields, shared_sampling
from blockyard.services.api_gateway.requests.validate import conversation_request
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard, Tokenize
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.output_format import OutputFormats, read_output_form
from blockyard.shared.ring_client.request_fields.structured_outputs import FieldGrammar, json_grammar
from blockyard.shared.ring_client.request_fields.tools import ToolUse

# fields that /v1/chat/completions names differently
RENAMED = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
}


def parse_messages(
    request: MessagesRequest, card: ModelCard, config: GatewayConfig, formats: OutputFormats, name: str
) -> GenerateRequest:
    """`name` is the unique part of the answer's id. Raises RequestError."""
    if request.max_tokens is None:
        raise RequestError("`max_tokens` is missing", "max_tokens")
    try:
        return _parsed(request, request.max_tokens, card, config, formats, name)
    except RequestError as e:
        raise _renamed(e) from e


def parse_count(
    request: MessagesRequest, card: ModelCard, config: GatewayConfig, formats: OutputFormats, name: str
) -> GenerateRequest:
    """The same request as `parse_messages` reads it, of which only the prompt is used. It may be of any length."""
    parsed = parse_messages(msgspec.structs.replace(request, max_tokens=1), card, config, formats, name)
    prompts = [msgspec.structs.replace(p, grammar=None, max_tokens=0) for p in parsed.prompts]
    return replace(parsed, prompts=prompts)


def _parsed(
    request: MessagesRequest,
    max_tokens: int,
    card: ModelCard,
    config: GatewayConfig,
    formats: OutputFormats,
    name: str,
) -> GenerateRequest:
    max_tokens = min(limits.integer("max_tokens", max_tokens, 0, 0), limits.MOST_TOKENS)
    offered = read_offered_tools(request.tools, request.tool_choice, card.settings.tools, config.strict_fields)
    thinking = request.thinking
    is_off = thinking is not None and thinking.type == "disabled"
    output = read_output_form(offered.use, formats)
    options = ResponseOptions(
        answer_id=f"msg_{name}",
        created=int(time.time()),
        model=card.answer_name,
        stream=bool(request.stream),
        usage_at_start=True,
        no_output=max_tokens == 0,
        prompt_tokens_details=True,
        include_reasoning=not is_off,
        has_reader=output is not None,
        messages=MessagesOptions(
            max_tokens, card.max_model_len, shows_thinking=thinking is None or thinking.display != "omitted"
        ),
    )
    fields = GenerationFields(
        stream=request.stream,
        stop=request.stop_sequences,
        user=None if request.metadata is None else request.metadata.user_id,
        thinking_token_budget=_thinking_budget(request, card),
        priority=request.priority,
        cache_salt=request.cache_salt,
        **shared_sampling(request),
    )
    parsed = conversation_request(
        fields,
        options,
        card,
        _prompt(request, card, offered.use),
        max_tokens,
        offered.use,
        output,
        formats,
        grammar=_grammar(request, card),
        thinks=not is_off,
    )
    return replace(parsed, ignored=offered.ignored)


def _prompt(request: MessagesRequest, card: ModelCard, tools: ToolUse | None) -> Tokenize:
    fields: dict[str, Any] = {}
    if request.thinking is not None:
        fields |= dict.fromkeys(REASONING_SWITCHES, request.thinking.type != "disabled")
    if request.output_config is not None:
        fields["reasoning_effort"] = request.output_config.effort
    messages = read_conversation(request.system, request.messages)
    prompt = messages_prompt(card, messages, tools, template_kwargs(card, fields, request.chat_template_kwargs))
    continues = request.messages is not None and request.messages[-1].role == "assistant"
    return msgspec.structs.replace(prompt, add_generation_prompt=not continues, continue_final_message=continues)


def _thinking_budget(request: MessagesRequest, card: ModelCard) -> int | None:
    """Most tokens of thinking; None: no limit. Where nothing finds the model's thinking, there is none to limit."""
    thinking = request.thinking
    if thinking is None or thinking.type != "enabled":
        return None
    if thinking.budget_tokens is None:
        raise RequestError("thinking of type enabled needs budget_tokens", "thinking.budget_tokens")
    budget = limits.integer("thinking.budget_tokens", thinking.budget_tokens, 0, 0)
    return budget if card.settings.tools.reasoning_end else None


def _grammar(request: MessagesRequest, card: ModelCard) -> FieldGrammar | None:
    asked, field = request.output_format, "output_format.schema"
    if request.output_config is not None and request.output_config.format is not None:
        if asked is not None:
            raise RequestError("output_config.format and output_format are two names of one field", "output_format")
        asked, field = request.output_config.format, "output_config.format.schema"
    if asked is None:
        return None
    return json_grammar(asked.schema, card.settings.grammars, field)


def _renamed(error: RequestError) -> RequestError:
    """The error with the field's name in this API."""
    name = RENAMED.get(error.field)
    if name is None:
        return error
    text = str(error).replace(error.field, name)
    return RequestError(text, name, error.status, error.code, error.retry_after_s, error.too_long)
