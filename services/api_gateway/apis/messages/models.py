"""The list of models as Anthropic's API writes it."""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from blockyard.shared.messages import ModelCard


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
    """The model under one of its names."""
    longest = card.max_model_len
    return ModelInfo(name, name, datetime.fromtimestamp(card.created, UTC), longest - 1, longest - 1)


def model_page(cards: Sequence[ModelCard]) -> ModelPage:
    models = [model_info(card, name) for card in cards for name in card.names]
    return ModelPage(models, models[0].id if models else None, models[-1].id if models else None)
