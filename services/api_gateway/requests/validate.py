"""From decoded JSON fields to a `GenerateRequest`: checks ranges, combinations and token ids of the vocabulary."""

import time
from dataclasses import replace
from typing import NamedTuple

import msgspec

from blockyard.services.api_gateway.requests.generate_request import MAX_ID_CHARS, GenerateRequest, ResponseOptions
from blockyard.services.api_gateway.requests.prompt_fields import (
    chat_prompt,
    completion_prompts,
    echoed_message,
    prompts_with_hole,
    thinking_is_off,
)
from blockyard.services.api_gateway.requests.schemas import ChatRequest, CompletionRequest, GenerationFields
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import DEFAULT_SAMPLING, ModelCard, RepetitionDetection, Tokenize
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.adapter_fields import tokenize_fields
from blockyard.shared.ring_client.request_fields.choices import Choices, read_choices
from blockyard.shared.ring_client.request_fields.engine_fields import (
    read_kv_transfer_params,
    read_logprob_ids,
    read_repetition,
    read_thinking_budget,
    read_xargs,
)
from blockyard.shared.ring_client.request_fields.forced_calls import calls_grammar
from blockyard.shared.ring_client.request_fields.known_fields import read_raw
from blockyard.shared.ring_client.request_fields.logits_processors import read_logits_processors
from blockyard.shared.ring_client.request_fields.output_format import (
    OutputForm,
    OutputFormats,
    prompt_markers,
    read_output_form,
    shown_special,
)
from blockyard.shared.ring_client.request_fields.sampling_fields import (
    fitting_truncation,
    read_bad_words,
    read_salt,
    read_sampling,
    read_text_options,
    read_truncation,
)
from blockyard.shared.ring_client.request_fields.structured_outputs import FieldGrammar, read_grammar
from blockyard.shared.ring_client.request_fields.tools import ToolMode, ToolUse, read_tools
from blockyard.shared.tool_parsers.tools import ToolKind

SERVICE_TIER = "default"  # of all requests


def parse_chat(
    request: ChatRequest, card: ModelCard, config: GatewayConfig, formats: OutputFormats, name: str
) -> GenerateRequest:
    """`name` is the unique part of the answer's id, where the request has none. Raises RequestError."""
    if request.suffix:
        raise RequestError("suffix is for /v1/completions; a chat has no hole in its prompt", "suffix")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise RequestError("max_tokens and max_completion_tokens are two names of one field", "max_completion_tokens")
    asked = limits.max_tokens("max_tokens", request.max_tokens, None)
    if request.max_completion_tokens is not None:
        asked = limits.max_tokens("max_completion_tokens", request.max_completion_tokens, None)
    num_top = _num_logprobs("top_logprobs", request.top_logprobs, card) or 0
    if num_top and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    tools = read_tools(request, card.settings.tools)
    output = read_output_form(tools, formats)
    options = replace(
        _response_options(request, card, config, "chatcmpl-", name),
        logprobs=bool(request.logprobs),
        num_top=num_top,
        include_reasoning=request.include_reasoning is not False,
        has_reader=output is not None,
        custom_tools=_custom_tools(tools),
        function_call=tools is not None and tools.older,
    )
    if request.echo:
        options = replace(options, echo_message=echoed_message(request, options.role))
    prompt, grammar = chat_prompt(request, card, tools), read_grammar(request, card.settings.grammars)
    thinks = not thinking_is_off(request, card)
    parsed = conversation_request(request, options, card, prompt, asked, tools, output, formats, grammar, thinks)
    return replace(parsed, wants_assistant_mask=bool(request.return_assistant_tokens_mask))


def conversation_request(
    request: GenerationFields,
    options: ResponseOptions,
    card: ModelCard,
    prompt: Tokenize,
    max_tokens: int | None,
    tools: ToolUse | None,
    output: OutputForm | None,
    formats: OutputFormats,
    grammar: FieldGrammar | None,
    thinks: bool,
) -> GenerateRequest:
    """The request of a chat, in any API: with tools, and an answer that is read into parts. Raises RequestError.

    The request asks for `grammar`; calls may replace it. `thinks`: the template is not told otherwise.
    """
    if tools is not None:
        _check_auto(tools, card)
        grammar = calls_grammar(output, tools, formats, card.settings.grammars, grammar)
    num_logprobs = options.num_top if options.logprobs else None
    of_prompt = options.prompt_logprobs
    parsed = _generate_request(request, options, card, [prompt], max_tokens, num_logprobs, of_prompt, grammar)
    if parsed.thinking_budget is None and grammar is not None and not thinks:
        parsed = replace(parsed, thinking_budget=0)  # the template may ignore it
    return _with_output(replace(parsed, prompt_field="messages", tools=tools), output, formats)


def _with_output(request: GenerateRequest, output: OutputForm | None, formats: OutputFormats) -> GenerateRequest:
    """The request with what the readers of its answer need."""
    if output is None:
        return request
    markers = prompt_markers(output, formats)
    return replace(
        request,
        output=output,
        prompts=[msgspec.structs.replace(p, reasoning_markers=markers) for p in request.prompts],
        text=msgspec.structs.replace(request.text, shown_special=shown_special(output, formats)),
    )


def _custom_tools(tools: ToolUse | None) -> tuple[str, ...]:
    return () if tools is None else tuple(tool.name for tool in tools.tools if tool.kind == ToolKind.CUSTOM)


def _check_auto(tools: ToolUse, card: ModelCard) -> None:
    """Raises RequestError if the model is to decide about calls, and its deployment cannot read them."""
    settings = card.settings.tools
    if tools.mode == ToolMode.AUTO and not (settings.auto_choice and settings.parser):
        raise RequestError(
            "a model that decides about calls needs the flags --enable-auto-tool-choice and --tool-call-parser of the "
            'server; without them tool_choice is "none", "required" or a named tool',
            tools.field,
        )


def parse_completion(
    request: CompletionRequest, card: ModelCard, config: GatewayConfig, _formats: OutputFormats, name: str
) -> GenerateRequest:
    """Parses a completion. No reader splits its text into parts: see `parse_chat`."""
    return completion_request(request, card, config, name, read_grammar(request, card.settings.grammars))


def completion_request(
    request: CompletionRequest,
    card: ModelCard,
    config: GatewayConfig,
    name: str,
    grammar: FieldGrammar | None,
    prefix: str = "cmpl-",
) -> GenerateRequest:
    """`prefix` is that of the answer's id. Raises RequestError."""
    echo = bool(request.echo)
    if echo and request.suffix:
        raise RequestError("echo shows a prompt without a hole: it cannot be combined with suffix", "echo")
    if request.suffix and request.truncation_side == "right":
        raise RequestError("texts around a hole are cut far from it: truncation_side has no say", "truncation_side")
    asked = limits.max_tokens("max_tokens", request.max_tokens, DEFAULT_SAMPLING.max_tokens, 0 if echo else 1)
    num_top = _num_logprobs("logprobs", request.logprobs, card)
    prompts = [
        msgspec.structs.replace(p, add_special_tokens=request.add_special_tokens, want_text=echo and p.text is None)
        for p in completion_prompts(request.prompt, card, bool(request.suffix))
    ]
    common = _response_options(request, card, config, prefix, name)
    of_prompt = common.prompt_logprobs
    if num_top is not None and echo:
        of_prompt = max(num_top, of_prompt or 0)
    options = replace(
        common,
        logprobs=num_top is not None,
        num_top=num_top or 0,
        echo=echo,
        no_output=asked == 0,
    )
    parsed = _generate_request(request, options, card, prompts, asked, num_top, of_prompt, grammar)
    if not request.suffix:
        return parsed
    prompts = prompts_with_hole(parsed.prompts, request.suffix, asked, parsed.truncate, card)
    return replace(parsed, prompts=prompts, truncate=None)


def _num_logprobs(field: str, value: int | None, card: ModelCard) -> int | None:
    return limits.num_logprobs(field, value, card.settings.max_logprobs, card.vocab_size)


def _response_options(
    request: GenerationFields, card: ModelCard, config: GatewayConfig, prefix: str, name: str
) -> ResponseOptions:
    """The options that chat and completions share. The answer's id is repeated by every event: it is bounded."""
    stream_options = request.stream_options
    if stream_options is not None and not request.stream:
        raise RequestError("stream_options is only for streamed answers", "stream_options")
    include_usage = stream_options.include_usage if stream_options is not None else False
    forces_usage = config.force_include_usage and bool(request.stream)
    continuous_usage = bool(
        stream_options is not None and stream_options.continuous_usage_stats and include_usage is not False
    )
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs is only for answers that are not streamed", "prompt_logprobs")
    of_prompt = _num_logprobs("prompt_logprobs", request.prompt_logprobs, card)
    as_ids = request.return_tokens_as_token_ids
    return ResponseOptions(
        answer_id=prefix + (limits.name("request_id", request.request_id, MAX_ID_CHARS) or name),
        created=int(time.time()),
        model=card.answer_name,
        role=card.settings.response_role,
        stream=bool(request.stream),
        include_usage=bool(include_usage) or continuous_usage or forces_usage,
        continuous_usage=continuous_usage,
        prompt_logprobs=of_prompt,
        tokens_as_ids=config.return_tokens_as_token_ids if as_ids is None else as_ids,
        token_ids=bool(request.return_token_ids),
        stamps=bool(request.return_stamps),
        prompt_tokens_details=config.enable_prompt_tokens_details,
        prompt_text=bool(request.return_prompt_text),
        system_fingerprint=config.system_fingerprint or None,
        service_tier=None if request.service_tier is None else SERVICE_TIER,
    )


class _EngineFields(NamedTuple):
    """Checked fields for parts of the engine."""

    repetition: RepetitionDetection | None
    xargs: bytes
    kv_transfer_params: bytes
    logprob_ids: list[int]


def _engine_fields(
    request: GenerationFields, options: ResponseOptions, card: ModelCard, choices: Choices
) -> _EngineFields:
    found = _EngineFields(
        read_repetition(request.repetition_detection),
        read_xargs(read_raw(request.vllm_xargs, "vllm_xargs")),
        read_kv_transfer_params(read_raw(request.kv_transfer_params, "kv_transfer_params")),
        read_logprob_ids(request.logprob_token_ids, options.logprobs, card.vocab_size),
    )
    for field, value in (("logprob_token_ids", found.logprob_ids), ("repetition_detection", found.repetition)):
        if choices.beam is not None and value:
            raise RequestError(f"a beam search has no {field}", field)
    return found


def _check_choices(choices: Choices, num_prompts: int, num_prompt_logprobs: int | None) -> None:
    """Raises RequestError."""
    if choices.beam is not None and num_prompt_logprobs is not None:
        raise RequestError("log-probabilities of the prompt are not part of a beam search", "use_beam_search")
    if choices.computed * num_prompts > limits.MAX_ANSWERS:
        raise RequestError(
            f"{num_prompts} prompts with {choices.returned} choices are more than {limits.MAX_ANSWERS} answers",
            "n",
        )


def _generate_request(
    request: GenerationFields,
    options: ResponseOptions,
    card: ModelCard,
    prompts: list[Tokenize],
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    grammar: FieldGrammar | None,
) -> GenerateRequest:
    choices, settings = read_choices(request, bool(request.stream)), card.settings
    _check_choices(choices, len(prompts), num_prompt_logprobs)
    processors = read_logits_processors(
        read_raw(request.logits_processors, "logits_processors"),
        settings.logits_processor_pattern,
        settings.logits_processors,
    )
    if choices.beam is not None and processors:
        raise RequestError("a beam search has no logits processors", "logits_processors")
    budget = read_thinking_budget(request.thinking_token_budget, settings.tools)
    reasoning_end = settings.tools.reasoning_end if grammar is not None or budget is not None else ""
    if grammar is not None and grammar.allows_reasoning:
        if budget is not None:
            what = f"calls that {grammar.field} forces in the format {settings.tools.parser}"
            raise RequestError(f"thinking_token_budget does not limit {what}", "thinking_token_budget")
        reasoning_end = ""
    if grammar is not None and choices.beam is not None:
        raise RequestError(f"a beam search cannot be limited by {grammar.field}", grammar.field)
    engine = _engine_fields(request, options, card, choices)
    if engine.logprob_ids:  # in place of the likeliest tokens
        options, num_logprobs = replace(options, num_top=len(engine.logprob_ids), listed_logprobs=True), 0
    salt, bad_words = read_salt(request.cache_salt), read_bad_words(request)
    truncate = fitting_truncation(read_truncation(request), max_tokens, card.max_model_len)
    sampling = read_sampling(request, card.vocab_size, settings.defaults)
    return GenerateRequest(
        card=card,
        options=options,
        prompts=[
            msgspec.structs.replace(
                tokenize_fields(p, card),
                bad_words=bad_words,
                cache_salt=salt,
                max_tokens=p.max_tokens if truncate is None else 0,
                grammar=grammar.grammar if grammar is not None else None,
                reasoning_end=reasoning_end,
                reasoning_start=settings.tools.reasoning_start if reasoning_end else "",
                inner_end=grammar.inner_end if grammar is not None else "",
            )
            for p in prompts
        ],
        prompt_field="prompt",
        sampling=choices.sampling(
            msgspec.structs.replace(
                sampling,
                num_logprobs=num_logprobs,
                num_prompt_logprobs=num_prompt_logprobs,
                logits_processors=processors,
                extra_args=engine.xargs,
                logprob_token_ids=engine.logprob_ids,
            )
        ),
        text=msgspec.structs.replace(read_text_options(request, options.tokens_as_ids), repetition=engine.repetition),
        choices=choices,
        seed=None if request.seed is None else request.seed % 2**64,
        max_tokens=max_tokens,
        truncate=truncate,
        keeps_start=request.truncation_side == "right",
        user=limits.name("user", request.user, limits.MAX_USER_CHARS),
        priority=limits.integer("priority", request.priority, 0, -(2**31), 2**31 - 1),
        cache_salt=salt,
        grammar_field=grammar.field if grammar is not None else "",
        thinking_budget=budget,
        kv_transfer_params=engine.kv_transfer_params,
        wants_offsets=bool(request.return_token_offsets),
    )
