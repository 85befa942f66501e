"""The two APIs of Anthropic's messages, as the registry lists them, and its list of models."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from blockyard.services.api_gateway.apis.interface import Api
from blockyard.services.api_gateway.apis.messages.errors import STATUSES, error_body
from blockyard.services.api_gateway.apis.messages.events import PING, MessageEvents, whole_answer
from blockyard.services.api_gateway.apis.messages.parse import parse_count, parse_messages
from blockyard.services.api_gateway.apis.messages.schemas import MessagesRequest
from blockyard.shared.messages import ModelCard

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


class ModelInfo(msgspec.Struct, frozen=True, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int
    max_tokens: int
    lifecycle: str = "active"


class ModelPage(msgspec.Struct, frozen=True):
    """All models: there is no further page."""

    data: Sequence[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def model_info(card: ModelCard, name: str) -> ModelInfo:
    longest = card.max_model_len
    return ModelInfo(name, name, datetime.fromtimestamp(card.created, UTC), longest - 1, longest - 1)


def model_page(cards: Sequence[ModelCard]) -> ModelPage:
    models = [model_info(card, name) for card in cards for name in (*card.names, *(one.name for one in card.adapters))]
    return ModelPage(models, models[0].id if models else None, models[-1].id if models else None)
