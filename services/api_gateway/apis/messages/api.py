"""The two APIs of Anthropic's messages, as the registry lists them."""

from dataclasses import replace

import msgspec

from blockyard.services.api_gateway.apis.interface import Api
from blockyard.services.api_gateway.apis.messages.errors import STATUSES, error_body
from blockyard.services.api_gateway.apis.messages.events import PING, MessageEvents, whole_answer
from blockyard.services.api_gateway.apis.messages.parse import parse_count, parse_messages
from blockyard.services.api_gateway.apis.messages.schemas import MessagesRequest

VERSION_HEADER = "anthropic-version"  # tells Anthropic's clients from others, on routes that both use


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


def _count(num_tokens: int) -> bytes:
    return msgspec.json.encode(TokenCount(num_tokens))


MESSAGES = Api(
    name="messages",
    paths=("/v1/messages",),
    schema=MessagesRequest,
    parse=parse_messages,
    events=MessageEvents,
    whole=whole_answer,
    error_body=error_body,
    error_statuses=STATUSES,
    keep_alive=PING,
)
COUNT_TOKENS = replace(
    MESSAGES, name="count_tokens", paths=("/v1/messages/count_tokens",), parse=parse_count, count=_count
)
