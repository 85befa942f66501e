"""Builds `Tokenize` frames from a prompt: a text, token ids, a list of either, or chat messages."""

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from blockyard.services.api_gateway.requests.schemas import ChatRequest, TokenizeRequest
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard, Tokenize
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.chat_messages import read_messages
from blockyard.shared.ring_client.request_fields.tools import ToolUse
from blockyard.shared.token_ids import first_outside, pack

REASONING_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that switch reasoning off


OUTPUT_SHARE = 2  # of the context, the most that is kept free for an answer when texts around a hole are cut


def prompts_with_hole(
    prompts: list[Tokenize], suffix: str, max_tokens: int | None, truncate: int | None, card: ModelCard
) -> list[Tokenize]:
    """The frames of texts with a hole and `suffix` behind them, cut so that the answer fits. Raises RequestError."""
    if any(prompt.text is None for prompt in prompts):
        raise RequestError("suffix needs a prompt that is text, not token ids", "suffix")
    kept = card.max_model_len // OUTPUT_SHARE
    most = card.max_model_len - (kept if max_tokens is None else min(max(max_tokens, 1), kept))
    if truncate is not None:
        most = min(most, truncate)
    return [msgspec.structs.replace(prompt, suffix=suffix, max_tokens=most) for prompt in prompts]


def completion_prompts(
    prompt: str | list[str | int | list[int]] | None, card: ModelCard, may_be_empty: bool = False
) -> list[Tokenize]:
    """One frame per prompt. may_be_empty: of a text. Raises RequestError."""
    if prompt is None:
        raise RequestError("`prompt` is missing", "prompt")
    if prompt == "" and may_be_empty:
        return [Tokenize(request_id="", model=card.names[0], text="", max_tokens=card.max_model_len)]
    if isinstance(prompt, str):
        return [_text(prompt, "prompt", card)]
    if not prompt:
        raise RequestError("`prompt` is empty", "prompt")
    if isinstance(prompt[0], int):
        return [_ids(cast(list[int], prompt), "prompt", card)]
    if len(prompt) > limits.MAX_PROMPTS:
        raise RequestError(f"at most {limits.MAX_PROMPTS} prompts a request, got {len(prompt)}", "prompt")
    out = []
    for i, p in enumerate(prompt):
        if isinstance(p, int):
            raise _mixed(i)
        out.append(_text(p, f"prompt[{i}]", card) if isinstance(p, str) else _ids(p, f"prompt[{i}]", card))
    return out


def chat_prompt(request: ChatRequest | TokenizeRequest, card: ModelCard, tools: ToolUse | None) -> Tokenize:
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
        )
    continues = bool(request.continue_final_message)
    prompt = messages_prompt(card, read_messages(request.messages), tools, _chat_kwargs(request, card))
    return msgspec.structs.replace(
        prompt,
        chat_template=request.chat_template,
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continues,
        add_special_tokens=request.add_special_tokens,
    )


def echoed_message(request: ChatRequest, role: str) -> str:
    """The text of the last message, if its role is that of the answer, as in vLLM; else empty."""
    last = request.messages[-1] if request.messages else None
    if last is None or last.content is None:
        return ""
    if last.role != role and request.add_generation_prompt is not False and not request.continue_final_message:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text for part in last.content if isinstance(part.text, str))


def messages_prompt(card: ModelCard, messages: bytes, tools: ToolUse | None, kwargs: dict[str, Any]) -> Tokenize:
    """The frame of messages, encoded as `read_messages` does it, with the variables of the chat template."""
    return Tokenize(
        request_id="",
        model=card.names[0],
        messages=messages,
        tools=tools.template_tools if tools is not None else b"",
        template_kwargs=msgspec.json.encode(kwargs) if kwargs else b"",
        max_tokens=card.max_model_len,
    )


def thinking_is_off(request: ChatRequest, card: ModelCard) -> bool:
    """Whether the template is told that the model does not reason."""
    return says_no_thinking(_chat_kwargs(request, card))


def says_no_thinking(kwargs: Mapping[str, Any]) -> bool:
    return any(kwargs.get(name) is False for name in REASONING_SWITCHES)


def template_kwargs(card: ModelCard, fields: Mapping[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
    """The model's variables, then fields of the request, then its chat_template_kwargs: the last one counts.

    `fields` are by the names that templates know, such as `reasoning_effort`; None: the request does not have it.
    """
    kwargs: dict[str, Any] = msgspec.json.decode(card.settings.template_kwargs or b"{}")
    kwargs |= {name: value for name, value in fields.items() if value is not None}
    if fields.get("reasoning_effort") == "none":
        kwargs |= dict.fromkeys(REASONING_SWITCHES, False)
    return kwargs | (given or {})


def _chat_kwargs(request: ChatRequest | TokenizeRequest, card: ModelCard) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if isinstance(request, ChatRequest):
        fields = {name: getattr(request, name) for name in ("reasoning_effort", "verbosity", "documents")}
    return template_kwargs(card, fields, request.chat_template_kwargs)


def _text(text: str, field: str, card: ModelCard) -> Tokenize:
    if not text:
        raise RequestError(f"`{field}` is empty", field)
    return Tokenize(request_id="", model=card.names[0], text=text, max_tokens=card.max_model_len)


def _ids(ids: list[int], field: str, card: ModelCard) -> Tokenize:
    """Checks every id against the vocabulary, without a Python loop: 32k ids take 0.8 ms."""
    if not ids:
        raise RequestError(f"`{field}` is empty", field)
    try:
        data = pack(ids)
        if first_outside(data, card.vocab_size) is not None:
            raise OverflowError
    except (OverflowError, TypeError):
        if not all(isinstance(one, int) for one in ids):  # the first element is an id
            raise _mixed(0) from None
        limits.token_ids(field, ids, card.vocab_size)  # raises with the id's place
        raise
    return Tokenize(request_id="", model=card.names[0], token_ids=data, max_tokens=card.max_model_len)


def _mixed(place: int) -> RequestError:
    return RequestError("`prompt` mixes ids with texts or lists", f"prompt[{place}]")
