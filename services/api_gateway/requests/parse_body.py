"""From the bytes of a body to a checked request: pure, so that large bodies are read in a process of their own."""

import codecs
from typing import Literal, TypeVar

import msgspec

from blockyard.services.api_gateway.http.request_context import MAX_ID_CHARS
from blockyard.services.api_gateway.requests.generate_request import Job
from blockyard.services.api_gateway.requests.prompt_fields import chat_prompt, completion_prompts
from blockyard.services.api_gateway.requests.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
)
from blockyard.services.api_gateway.requests.validate import read_chat, read_completion
from blockyard.services.api_gateway.responses.error_body import ApiError
from blockyard.shared.config.gateway import GatewayConfig
from blockyard.shared.messages import Detokenize, ModelCard, Tokenize
from blockyard.shared.ring_client import limits
from blockyard.shared.ring_client.admission import Served
from blockyard.shared.ring_client.chat_messages import NULL
from blockyard.shared.token_ids import pack

Kind = Literal["chat", "completion", "invocation", "tokenize", "detokenize"]
T = TypeVar("T", bound=msgspec.Struct)


class Invocation(msgspec.Struct):
    """As much of a body as tells chat from completions."""

    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL


class Terms(msgspec.Struct, frozen=True):
    """What a body is read by."""

    kind: Kind
    request_id: str  # where the body brings none
    served: Served


class Generation(msgspec.Struct, frozen=True, tag=True):
    """Of a chat or a completion."""

    job: Job
    ignored: list[str]  # unknown fields


class TextJob(msgspec.Struct, frozen=True, tag=True):
    """Of /tokenize and /detokenize; the work has no id yet."""

    work: Tokenize | Detokenize
    card: ModelCard
    want_pieces: bool
    ignored: list[str]


Asked = Generation | TextJob


def read_body(body: bytes, terms: Terms, config: GatewayConfig) -> Asked:
    """Raises ApiError."""
    kind = _invoked(body) if terms.kind == "invocation" else terms.kind
    if kind == "chat":
        chat, ignored = decode(body, ChatRequest, config.strict_fields)
        card = terms.served.card(chat.model)
        return Generation(read_chat(chat, card, config, _request_id(chat.request_id, terms)), ignored)
    if kind == "completion":
        completion, ignored = decode(body, CompletionRequest, config.strict_fields)
        card = terms.served.card(completion.model)
        name = _request_id(completion.request_id, terms)
        job = read_completion(completion, card, config, name)
        check_lengths(job)
        return Generation(job, ignored)
    if kind == "tokenize":
        return _tokenize(body, terms, config)
    return _detokenize(body, terms, config)


def check_lengths(job: Job) -> None:
    """Refuses a prompt of token ids that does not fit before its ids go anywhere. Raises RequestError."""
    for prompt in job.prompts if job.truncate is None else ():
        if prompt.token_ids is not None:
            job.settle(len(prompt.token_ids) // 4, [])


def _request_id(asked: str | None, terms: Terms) -> str:
    """The part of the answer's id that tells requests apart. It stands in every event, so it has a bound."""
    return limits.name("request_id", asked, MAX_ID_CHARS) or terms.request_id


def _invoked(body: bytes) -> Kind:
    """The endpoint that is meant. Errors of the body are told by that endpoint."""
    try:
        asked = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8), type=Invocation)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "completion"
    if bytes(asked.messages) == bytes(NULL) == bytes(asked.prompt):
        raise ApiError("either messages, as for chat completions, or prompt, as for completions", "messages")
    return "completion" if bytes(asked.messages) == bytes(NULL) else "chat"


def _tokenize(body: bytes, terms: Terms, config: GatewayConfig) -> TextJob:
    asked, ignored = decode(body, TokenizeRequest, config.strict_fields)
    card = terms.served.card(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError("either prompt or messages, and not both", "prompt")
    if asked.messages is not None:
        work = chat_prompt(asked, card)
    else:
        work = msgspec.structs.replace(
            completion_prompts(asked.prompt, card)[0], add_special_tokens=asked.add_special_tokens
        )
    wants = bool(asked.return_token_strs)
    return TextJob(msgspec.structs.replace(work, want_pieces=wants), card, wants, ignored)


def _detokenize(body: bytes, terms: Terms, config: GatewayConfig) -> TextJob:
    asked, ignored = decode(body, DetokenizeRequest, config.strict_fields)
    card = terms.served.card(asked.model)
    if len(asked.tokens) > card.max_model_len:
        raise ApiError(
            f"at most {card.max_model_len} tokens, the model's maximum context length, got {len(asked.tokens)}",
            "tokens",
            code="context_length_exceeded",
        )
    limits.token_ids("tokens", asked.tokens, card.vocab_size)
    return TextJob(Detokenize("", card.names[0], pack(asked.tokens)), card, False, ignored)
