"""Parses the body of a request for one of the endpoints. Pure, so that a process of its own can do it too."""

import msgspec

from blockyard.services.api_gateway.apis.pooling.interface import PoolingApi
from blockyard.services.api_gateway.apis.pooling.registry import POOLING_APIS
from blockyard.services.api_gateway.apis.registry import APIS
from blockyard.services.api_gateway.bodies.invocations import invoked_endpoint
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest, StoredTurn
from blockyard.services.api_gateway.requests.pooling.pooling_request import PoolingRequest
from blockyard.services.api_gateway.requests.prompt_fields import chat_prompt, completion_prompts
from blockyard.services.api_gateway.requests.schemas import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
)
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Detokenize, ModelCard, Tokenize, Tokenized
from blockyard.shared.ring_client.pooling.params_check import check_generates
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.adapter_fields import adapter_tokenizer
from blockyard.shared.ring_client.request_fields.output_format import ModelFormats
from blockyard.shared.ring_client.request_fields.tools import read_tools
from blockyard.shared.ring_client.schedulers import Served
from blockyard.shared.token_ids import pack

INVOCATION, TOKENIZE, DETOKENIZE = "invocation", "tokenize", "detokenize"  # endpoints that `APIS` lacks


class ParseContext(msgspec.Struct, frozen=True):
    """Everything but the body and the configuration that parsing depends on."""

    endpoint: str  # the name of an API of either registry, or one of the constants above
    request_id: str  # used where the body has none
    served: Served
    stored: StoredTurn | None = None  # set: the answer may be stored

    @property
    def num_bytes(self) -> int:
        """Of stored items that belong to the body's conversation."""
        return 0 if self.stored is None else len(self.stored.history) + len(self.stored.referenced)


class ParsedGeneration(msgspec.Struct, frozen=True, tag=True):
    api: str  # its name
    request: GenerateRequest
    ignored: list[str]  # unknown fields, and what the API left out


class ParsedText(msgspec.Struct, frozen=True, tag=True):
    """A request to /tokenize or /detokenize. `work` has no request id yet."""

    work: Tokenize | Detokenize
    card: ModelCard
    want_pieces: bool
    ignored: list[str]


class ParsedPooling(msgspec.Struct, frozen=True, tag=True):
    api: str  # its name
    request: PoolingRequest
    ignored: list[str]


ParsedBody = ParsedGeneration | ParsedText | ParsedPooling


def parse_body(body: bytes, context: ParseContext, config: GatewayConfig, formats: ModelFormats) -> ParsedBody:
    """Raises RequestError."""
    if context.endpoint == TOKENIZE:
        return _tokenize(body, context, config)
    if context.endpoint == DETOKENIZE:
        return _detokenize(body, context, config)
    endpoint = context.endpoint
    if endpoint == INVOCATION:
        endpoint = invoked_endpoint(body, context.served)
    if endpoint in POOLING_APIS:
        return _pooling(body, POOLING_APIS[endpoint], context, config)
    api = APIS[endpoint]
    fields, ignored = decode(body, api.schema, config.strict_fields)
    card = context.served.card(fields.model)
    if api.count is None:
        check_generates(card)
    try:
        if context.stored is None or api.parse_stored is None:
            request = api.parse(fields, card, config, formats.of(card), context.request_id)
        else:
            request = api.parse_stored(fields, card, config, formats.of(card), context.request_id, context.stored)
    except RecursionError as e:  # a deep body may be decoded and not encoded
        raise RequestError("the body is nested too deeply") from e
    check_lengths(request)
    return ParsedGeneration(api.name, request, [*ignored, *request.ignored])


def _pooling(body: bytes, api: PoolingApi, context: ParseContext, config: GatewayConfig) -> ParsedPooling:
    fields, ignored = decode(body, api.schema, config.strict_fields)
    try:
        request = api.parse(fields, context.served.card(fields.model), context.request_id)
    except RecursionError as e:
        raise RequestError("the body is nested too deeply") from e
    return ParsedPooling(api.name, request, ignored)


def check_lengths(request: GenerateRequest) -> None:
    """Refuses prompts of token ids that do not fit the context, before they are sent. Raises RequestError."""
    for prompt in request.prompts if request.truncate is None else ():
        if prompt.token_ids is not None:
            request.finalize_sampling(Tokenized("", prompt.token_ids, b""))


def _tokenize(body: bytes, context: ParseContext, config: GatewayConfig) -> ParsedText:
    asked, ignored = decode(body, TokenizeRequest, config.strict_fields)
    card = context.served.card(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("either prompt or messages, and not both", "prompt")
    if asked.messages is not None:
        work = chat_prompt(asked, card, read_tools(ChatRequest(tools=asked.tools), card.settings.tools))
    else:
        work = msgspec.structs.replace(
            completion_prompts(asked.prompt, card)[0], add_special_tokens=asked.add_special_tokens
        )
    wants = bool(asked.return_token_strs)
    work = msgspec.structs.replace(work, want_pieces=wants, adapter=adapter_tokenizer(card))
    return ParsedText(work, card, wants, ignored)


def _detokenize(body: bytes, context: ParseContext, config: GatewayConfig) -> ParsedText:
    asked, ignored = decode(body, DetokenizeRequest, config.strict_fields)
    card = context.served.card(asked.model)
    if len(asked.tokens) > card.max_model_len:
        raise RequestError(
            f"at most {card.max_model_len} tokens, the model's maximum context length, got {len(asked.tokens)}",
            "tokens",
            code="context_length_exceeded",
        )
    limits.token_ids("tokens", asked.tokens, card.vocab_size)
    work = Detokenize("", card.names[0], pack(asked.tokens), adapter=adapter_tokenizer(card))
    return ParsedText(work, card, False, ignored)
